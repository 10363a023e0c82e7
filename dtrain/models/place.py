"""Where a parameter is in published files: the name of its tensor there, and the layout of its values.

A matrix is stored there as (out, in), without a dim for the heads, with one tensor per layer and per expert. GPT-2
stores (in, out), and queries, keys and values concatenated in one tensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from dtrain.models.nn.param import Param

APART = {"layer": "layer", "experts": "expert"}
"""Dims whose every index has a tensor of its own, and the field for that index in the tensor's name."""


Index = Sequence[slice]
Load = Callable[[str, tuple[slice, ...]], np.ndarray]
"""Reads a part of a tensor by its name: one slice with start and stop for each of its dims."""


@dataclass(frozen=True)
class Place:
    """The published name of a parameter and the layout of its tensor."""

    name: str
    """With {layer} and {expert} for the indices of those dims."""
    transposed: bool = False
    """Whether the tensor is transposed: (out, in) in place of (in, out)."""
    start: int = 0
    total: int = 0
    """Where several parameters are concatenated along `out` in one tensor: the first index of this one, and the size
    of `out` of the tensor; 0 where the tensor is the parameter's own."""
    numbers: tuple[int, ...] = ()
    """The number there of each layer of the stack; (): 0, 1, 2 and so on."""
    count: str = ""
    """The tensor that PyTorch writes beside it, a whole number: the steps of batch normalisation. dtrain writes 0."""

    def names(self, param: Param) -> list[str]:
        """The tensors of the parameter, in the order of its leading dims."""
        dims = _apart(param)
        ranges = [range(size) for size in param.shape[: len(dims)]]
        return [self._named(dims, numbers) for numbers in product(*ranges)]

    def _named(self, dims: Sequence[str], numbers: Sequence[int]) -> str:
        there = dict(zip(dims, numbers, strict=True))
        if self.numbers and "layer" in there:
            there["layer"] = self.numbers[there["layer"]]
        return self.name.format(**{APART[dim]: number for dim, number in there.items()})

    def shape(self, param: Param) -> tuple[int, ...]:
        """The shape of each tensor: a matrix is (in, out) or (out, in), its head dims merged."""
        *outer, last = (math.prod(sizes) for sizes in _groups(param))
        shape = (*outer, self.total or last)
        return shape[::-1] if self.transposed else shape

    def read(self, load: Load, param: Param, index: Index) -> np.ndarray:
        """The part of the parameter at `index`: a slice with start and stop for each of its dims.

        Of each tensor only the rows and columns are read that the part needs.
        """
        dims = _apart(param)
        apart, inner = index[: len(dims)], index[len(dims) :]
        ranges = [range(part.start, part.stop) for part in apart]
        parts = [self._part(load, self._named(dims, numbers), param, list(inner)) for numbers in product(*ranges)]
        if not dims:
            return parts[0]
        return np.stack(parts).reshape(*map(len, ranges), *parts[0].shape)

    def _part(self, load: Load, name: str, param: Param, inner: list[slice]) -> np.ndarray:
        """The part of one tensor. Of dims that are merged in it, only the first is sliced in the file."""
        wanted, shape, rest = [], [], []
        for sizes in _groups(param):
            first, *others = (inner.pop(0) for _ in sizes)
            size = math.prod(sizes[1:])
            wanted.append(slice(first.start * size, first.stop * size))
            shape += [first.stop - first.start, *sizes[1:]]
            rest += [slice(None), *others]
        wanted[-1] = slice(wanted[-1].start + self.start, wanted[-1].stop + self.start)
        values = load(name, tuple(wanted[::-1] if self.transposed else wanted))
        return (values.T if self.transposed else values).reshape(shape)[tuple(rest)]

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        """A whole tensor of this parameter alone: the caller concatenates those that share one, in order of `start`."""
        flat = values.reshape([math.prod(sizes) for sizes in _groups(param)])
        return flat.T if self.transposed else flat

    @property
    def alone(self) -> bool:
        """Whether the tensor is a matrix (out, in) of this parameter alone."""
        return self.transposed and not self.total

    @property
    def key(self) -> int:
        """The order of the parameters that share a tensor."""
        return self.start

    def joined(self, parts: Mapping[int, np.ndarray]) -> np.ndarray | None:
        """The tensor, from what `write` gave for each parameter that it has, by `key`; None if one is missing."""
        outputs = 0 if self.transposed else -1  # where they are concatenated
        ordered = [parts[key] for key in sorted(parts)]
        if self.total and sum(one.shape[outputs] for one in ordered) < self.total:
            return None
        return ordered[0] if len(ordered) == 1 else np.concatenate(ordered, outputs)


@dataclass(frozen=True)
class Alternating(Place):
    """A parameter that shares a tensor with others: some outputs of each of them in turn. The tensor is read whole."""

    runs: tuple[int, ...] = (1,)
    """The outputs of each parameter that follow one another."""
    part: int = 0
    """The number of this parameter among them."""
    together: bool = False
    """Whether the tensor has all experts, along its first dim."""

    def _apart(self, param: Param) -> list[str]:
        dims = _apart(param)
        return dims[:1] if self.together and dims[:1] == ["layer"] else [] if self.together else dims

    def _own(self, param: Param) -> list[int]:
        """The shape of one tensor's share of the parameter: (experts, in, out), of which some may be missing."""
        apart, lead = len(self._apart(param)), int(self.together)
        rest = _groups(param) if param.fan_in else [param.shape[apart + lead :]]
        return [*param.shape[apart : apart + lead], *(math.prod(sizes) for sizes in rest)]

    def _turned(self, values: np.ndarray) -> np.ndarray:
        return np.swapaxes(values, -1, -2) if self.transposed else values

    def names(self, param: Param) -> list[str]:
        dims = self._apart(param)
        return [self._named(dims, numbers) for numbers in product(*map(range, param.shape[: len(dims)]))]

    def shape(self, param: Param) -> tuple[int, ...]:
        *outer, last = self._own(param)
        shape = [*outer, last // self.runs[self.part] * sum(self.runs)]
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else tuple(shape)

    def read(self, load: Load, param: Param, index: Index) -> np.ndarray:
        dims, shape, own = self._apart(param), self.shape(param), self._own(param)
        count = len(dims) + self.together
        some = [index[len(dims)]] if self.together else []
        whole = (*some, *(slice(0, size) for size in shape[len(some) :]))
        found = []
        for numbers in product(*(range(part.start, part.stop) for part in index[: len(dims)])):
            values = self._turned(load(self._named(dims, numbers), whole))
            values = values.reshape(*values.shape[:-1], -1, sum(self.runs))
            values = np.split(values, np.cumsum(self.runs[:-1]), axis=-1)[self.part]
            leading = [some[0].stop - some[0].start] if some else []
            found.append(values.reshape(*leading, *own[len(some) :]).reshape(*leading, *param.shape[count:]))
        inner = (*(slice(None) for _ in some), *index[count:])
        parts = [values[inner] for values in found]
        if not dims:
            return parts[0]
        return np.stack(parts).reshape(*(part.stop - part.start for part in index[: len(dims)]), *parts[0].shape)

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        return values.reshape(self._own(param))

    @property
    def alone(self) -> bool:
        return self.transposed and len(self.runs) == 1 and not self.together

    @property
    def key(self) -> int:
        return self.part

    def joined(self, parts: Mapping[int, np.ndarray]) -> np.ndarray | None:
        if len(parts) < len(self.runs):
            return None
        runs = [parts[key].reshape(*parts[key].shape[:-1], -1, self.runs[key]) for key in sorted(parts)]
        whole = np.concatenate(runs, -1)
        return self._turned(whole.reshape(*whole.shape[:-2], -1))


@dataclass(frozen=True)
class LayersTogether(Place):
    """A table or matrix of each layer: in the tensor, those of all layers are side by side. A table is (rows, layers x
    columns) there, and transposed, a matrix (layers x out, in)."""

    stacks: tuple[tuple[int, ...], ...] = ()
    """The numbers there of the layers of each stack that the tensor has."""

    def names(self, param: Param) -> list[str]:
        return [self.name]

    def shape(self, param: Param) -> tuple[int, ...]:
        rows, columns = param.shape[1], param.shape[2] * sum(map(len, self.stacks))
        return (columns, rows) if self.transposed else (rows, columns)

    def read(self, load: Load, param: Param, index: Index) -> np.ndarray:
        layers, rows, columns = index

        def one(layer: int) -> np.ndarray:
            start = self.stacks[self.key][layer] * param.shape[2]
            part = (rows, slice(start + columns.start, start + columns.stop))
            return load(self.name, part[::-1]).T if self.transposed else load(self.name, part)

        return np.stack([one(layer) for layer in range(layers.start, layers.stop)])

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        return values.reshape(param.shape)

    @property
    def alone(self) -> bool:
        return False

    @property
    def key(self) -> int:
        return self.stacks.index(self.numbers) if self.numbers else 0

    def joined(self, parts: Mapping[int, np.ndarray]) -> np.ndarray | None:
        if len(parts) < len(self.stacks):
            return None
        by_layer = {number: layer for key, stack in enumerate(self.stacks) for number, layer in zip(stack, parts[key])}
        whole = np.concatenate([by_layer[number] for number in sorted(by_layer)], 1)
        return whole.T if self.transposed else whole


@dataclass(frozen=True)
class Channels(Place):
    """The taps (heads, values, taps), or (channels, taps), of a convolution of each channel for itself: (channels, 1,
    taps) there, where several parameters are concatenated by their channels."""

    def shape(self, param: Param) -> tuple[int, ...]:
        return self.total, 1, param.shape[-1]

    def _part(self, load: Load, name: str, param: Param, inner: list[slice]) -> np.ndarray:
        first, *values, taps = inner
        sizes = param.shape[len(param.shape) - 1 - len(values) : -1]  # of the dims beside the first
        size = math.prod(sizes)
        channels = slice(self.start + first.start * size, self.start + first.stop * size)
        found = load(name, (channels, slice(0, 1), taps))
        return found.reshape(first.stop - first.start, *sizes, -1)[(slice(None), *values)]

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        return values.reshape(-1, 1, param.shape[-1])

    @property
    def alone(self) -> bool:
        return False


@dataclass(frozen=True)
class Row(Place):
    """A parameter of one dim whose tensor has a dim of size one before it."""

    def shape(self, param: Param) -> tuple[int, ...]:
        return (1, *super().shape(param))

    def read(self, load: Load, param: Param, index: Index) -> np.ndarray:
        return super().read(lambda name, part: load(name, (slice(0, 1), *part))[0], param, index)

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        return super().write(values, param)[None]


@dataclass(frozen=True)
class Later(Place):
    """A table whose tensor has `skipped` rows before its own, which are not read and written as zeros."""

    skipped: int = 0

    def shape(self, param: Param) -> tuple[int, ...]:
        rows, *rest = super().shape(param)
        return (rows + self.skipped, *rest)

    def read(self, load: Load, param: Param, index: Index) -> np.ndarray:
        rows, *rest = index
        moved = slice(rows.start + self.skipped, rows.stop + self.skipped)
        return load(self.name, (moved, *rest))

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        own = super().write(values, param)
        return np.concatenate([np.zeros((self.skipped, *own.shape[1:]), own.dtype), own])


@dataclass(frozen=True)
class OneLayer(Place):
    """A parameter of a layer that is in no stack; `inner` says where that of a stack of one layer is."""

    inner: Place = Place("")

    def names(self, param: Param) -> list[str]:
        return self.inner.names(_stacked(param))

    def shape(self, param: Param) -> tuple[int, ...]:
        return self.inner.shape(_stacked(param))

    def read(self, load: Load, param: Param, index: Index) -> np.ndarray:
        return self.inner.read(load, _stacked(param), (slice(0, 1), *index))[0]

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        return self.inner.write(values, _stacked(param))

    @property
    def alone(self) -> bool:
        return self.inner.alone

    @property
    def key(self) -> int:
        return self.inner.key

    def joined(self, parts: Mapping[int, np.ndarray]) -> np.ndarray | None:
        return self.inner.joined(parts)


def _stacked(param: Param) -> Param:
    """The same parameter in a stack of one layer."""
    return replace(param, shape=(1, *param.shape), dims=f"layer {param.dims}")


@dataclass(frozen=True)
class Whole(Place):
    """A parameter under dtrain's own name and in its own shape."""

    def names(self, param: Param) -> list[str]:
        return [self.name]

    def shape(self, param: Param) -> tuple[int, ...]:
        return param.shape

    def read(self, load: Load, param: Param, index: Index) -> np.ndarray:
        return load(self.name, tuple(index))

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        return values.reshape(param.shape)


def _apart(param: Param) -> list[str]:
    return [dim for dim in param.names[:2] if dim in APART]


def _groups(param: Param) -> list[tuple[int, ...]]:
    """The sizes of the parameter's dims that are merged into each dim of its tensor.

    A matrix, which has a `fan_in`, is (in, out); a stacked bias or scale has one dim; a table keeps its own.
    """
    count = len(_apart(param))
    sizes, names = param.shape[count:], param.names[count:]
    if param.fan_in:
        cut = 1 + max(number for number, name in enumerate(names) if name in param.fan_in)
        return [sizes[:cut], sizes[cut:]]
    return [sizes] if count else [(size,) for size in sizes]


@dataclass(frozen=True)
class Reordered(Place):
    """A parameter whose tensor has its dims in another order, such as the kernel of a convolution; read whole."""

    split: tuple[int, ...] = ()
    """The shape that the parameter is brought into before its dims are reordered; (): its own. -1: what remains."""
    axes: tuple[int, ...] = ()
    """The dim of that shape that each dim of the tensor is."""

    def _split(self, param: Param) -> tuple[int, ...]:
        known = -math.prod(self.split)
        return tuple(param.size // known if size == -1 else size for size in self.split or param.shape)

    def shape(self, param: Param) -> tuple[int, ...]:
        split = self._split(param)
        return tuple(split[axis] for axis in self.axes)

    def names(self, param: Param) -> list[str]:
        return [self.name]

    def read(self, load: Load, param: Param, index: Index) -> np.ndarray:
        values = load(self.name, tuple(slice(0, size) for size in self.shape(param)))
        return values.transpose(np.argsort(self.axes)).reshape(param.shape)[tuple(index)]

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        return values.reshape(self._split(param)).transpose(self.axes)


def kernel(name: str) -> Reordered:
    """The kernel of a convolution: (height, width, in, out) here, (out, in, height, width) there."""
    return Reordered(name, axes=(3, 2, 0, 1))


@dataclass(frozen=True)
class Naming:
    """How a library names the parameters of a model."""

    library: str
    places: Mapping[str, Place]
    """By the parameter's path."""
    family: str = ""
    """A family of decoders that has these names."""
    unused: frozenset[str] = frozenset()
    """Tensors that files may have, and such a model does not use."""
