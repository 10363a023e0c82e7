"""Sharding rules: from the names of an array's dims to its PartitionSpec; checks that the mesh fits the model."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.core.chips import Chip, chip_of
from dtrain.core.errors import RecipeError
from dtrain.core.types import Device
from dtrain.data.batch import Example
from dtrain.models.nn.param import UNNAMED, Param, Tree, count, paths
from dtrain.models.nn.quantised import in_full, is_quantised, mapped
from dtrain.parallel.mesh import AXES, DATA, FSDP_AXES, RULES, SEQUENCE, SPLITS, TENSOR

Rules = Mapping[str, tuple[str, ...]]
SPLIT_FROM = 1024
"""Fewest values of a parameter with unnamed dims that is split over fsdp: to gather smaller ones costs more time."""


@dataclass(frozen=True)
class Layout:
    """Mesh sizes, rules, declared parameters and examples: everything that decides which device holds what.

    `mesh` is the `jax.sharding.Mesh`, or None if there are no devices and only the arithmetic is needed.
    """

    sizes: Mapping[str, int]
    rules: Rules
    declared: Tree
    mesh: jax.sharding.Mesh | None = None
    example: Example = field(default_factory=dict)

    def axes(self, dim: str | None) -> tuple[str, ...]:
        """The axes of more than one device that split this dim."""
        return tuple(axis for axis in self.rules.get(dim or "", ()) if self.sizes[axis] > 1)

    def parts(self, dim: str) -> int:
        """The number of parts into which this dim is split."""
        return math.prod(self.sizes[axis] for axis in self.axes(dim))

    def shares(self, dim: str) -> int:
        """The number of devices that split the work along this dim; axes that only save memory do not count."""
        return math.prod(self.sizes[axis] for axis in self.axes(dim) if axis not in FSDP_AXES)

    def spec(self, dims: Iterable[str | None]) -> PartitionSpec:
        """The PartitionSpec of an array with these dims; trailing dims that are not split are left out."""
        entries = [self.axes(dim) for dim in dims]
        while entries and not entries[-1]:
            entries.pop()
        return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))

    def specs(self) -> Tree:
        """The PartitionSpec of every parameter."""
        return jax.tree.map(lambda param: self.spec(param.names), self.declared)

    def input(self, name: str) -> PartitionSpec:
        """The PartitionSpec of the batch array of that name."""
        return self.spec(("batch", *(self.example[name].dims if name in self.example else ())))

    def zigzag_order(self, name: str) -> np.ndarray | None:
        """The order in which a row's tokens are divided over the sequence axis; None for their own order.

        Of 2S chunks, part s of S holds chunks s and 2S - 1 - s, so that under a causal mask all parts have the same
        number of query-key pairs (Dubey et al. 2024, section 3.3.2).
        """
        parts = self.sizes[SEQUENCE]
        if parts == 1 or name not in self.example or self.example[name].dims[:1] != ("length",):
            return None
        return zigzag_positions(self.example[name].shape[0], parts)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes of more than one device that split the examples."""
        return self.axes("batch")

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split examples or tokens: losses and gradients are summed over them."""
        return (*self.axes("batch"), *self.axes("length"))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """The PartitionSpec on this mesh."""
        assert self.mesh is not None, "a layout without a mesh has no shardings"
        return NamedSharding(self.mesh, spec)

    @property
    def values(self) -> int:
        """Number of values of all parameters, padding left out; of a quantised matrix those of the matrix."""
        return count(in_full(self.declared))

    @property
    def devices(self) -> list[Device]:
        """The devices of the mesh."""
        return [] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices: "cpu", "gpu" or "tpu"."""
        return self.mesh.devices.flat[0].platform if self.mesh is not None else "cpu"

    @property
    def chip(self) -> Chip | None:
        """The chip of the mesh's devices; None if the table of chips does not have it."""
        return chip_of(self.mesh.devices.flat[0].device_kind) if self.mesh is not None else None

    def problems(self) -> list[tuple[str, str]]:
        """(axis, message) for parameters that the rules cannot split, axes that split nothing, rows that do not fit."""
        same: dict[tuple[str, str, int], list[str]] = {}
        for path, param in zip(jax.tree.leaves(paths(self.declared)), jax.tree.leaves(self.declared), strict=True):
            for axis, dim, size, message in self._unplaced(path, param):
                same.setdefault((axis, dim, size), []).append(message)
        unplaced = [
            (axis, messages[0] + (f" (and {len(messages) - 1} more like it)" if len(messages) > 1 else ""))
            for (axis, _, _), messages in same.items()
        ]
        return unplaced + self._unused() + self._heads() + self._idle() + self._uneven()

    @property
    def dims(self) -> set[str]:
        """The names of the parameters' dims."""
        return {dim for param in jax.tree.leaves(self.declared) for dim in param.names}

    def _unused(self) -> list[tuple[str, str]]:
        """Rules in the recipe for dims that no parameter has."""
        known, problems = self.dims - {"_"}, []
        for dim in (dim for dim, axes in self.rules.items() if axes != RULES.get(dim) and dim not in known):
            near = difflib.get_close_matches(dim, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"this model has {', '.join(sorted(known))}"
            problems.append((f"rules.{dim}", f"no parameter has a dim {dim!r}; {hint}"))
        return problems

    def _heads(self) -> list[tuple[str, str]]:
        """Query heads that are replicated while their keys and values are split."""
        if (
            not {"heads", "kv_heads"} <= self.dims
            or TENSOR in self.axes("heads")
            or TENSOR not in self.axes("kv_heads")
        ):
            return []
        why = "heads are replicated and kv_heads split by tensor: a query head would be without its keys"
        return [("rules.heads", f"{why}; give kv_heads the same rule")]

    def _unplaced(self, path: str, param: Param) -> list[tuple[str, str, int, str]]:
        """(axis, dim, its size, message) for each dim that cannot be split by its rule."""
        problems, used = [], dict[str, str]()
        for size, dim in zip(param.shape, param.names, strict=True):
            for axis in self.axes(dim)[:1]:  # several axes form fsdp: the first has that name
                if axis in used:
                    rules = f"{used[axis]}: {axis} and {dim}: {axis}"
                    message = f"{path} {param.shape} is matched by two rules for one axis, {rules}"
                    problems.append((axis, rules, 0, message))
                used[axis] = dim
                if size % self.parts(dim):
                    message = f"{axis} = {self.parts(dim)} does not divide {dim} = {size} of {path} {param.shape}"
                    alternative = ", or mesh.rules: {kv_heads: replicated}" if dim == "kv_heads" else ""
                    blocks = param.dtype and path.endswith((".codes", ".scales"))
                    alternative += "; it is counted in blocks of lora.dtype, and bfloat16 has none" if blocks else ""
                    problems.append((axis, dim, size, f"{message}; {fitting(size)}{alternative}"))
        return problems

    def _idle(self) -> list[tuple[str, str]]:
        """Axes that split no dim of the model or the data: their devices would repeat the same work."""
        dims = self.dims | {dim for feature in self.example.values() for dim in feature.dims}
        busy = {axis for dim in dims for axis in self.axes(dim)} | {axis for axis in AXES if SPLITS[axis] == "examples"}
        return [
            (axis, f"{axis} = {self.sizes[axis]} splits nothing: this model has no {SPLITS[axis]} to split; use 1")
            for axis in AXES
            if self.sizes[axis] > 1 and axis not in busy and (axis != SEQUENCE or self.example)
        ]

    def _uneven(self) -> list[tuple[str, str]]:
        """Rows whose length the mesh does not divide."""
        problems = []
        for name, feature in self.example.items():
            sequence, tensor = self.sizes[SEQUENCE], self.sizes[TENSOR]
            # the zigzag order has two chunks for each part of sequence, and tensor splits the tokens of a part again
            unit = (2 * sequence if sequence > 1 else 1) * tensor
            if feature.dims[:1] == ("length",) and feature.shape[0] % unit:
                factors = (
                    f"2 x sequence {sequence} x tensor {tensor} = {unit}" if sequence > 1 else f"tensor = {tensor}"
                )
                message = f"the row length {feature.shape[0]} of {name!r} is not a multiple of {factors}"
                problems.append((SEQUENCE if sequence > 1 else TENSOR, message))
                break
        return problems

    def check(self) -> None:
        """Raise RecipeError with all problems."""
        problems = [f"mesh.{axis}: {message}" for axis, message in self.problems()]
        if problems:
            raise RecipeError(problems)

    def replicated(self) -> list[tuple[str, Param]]:
        """Path and declaration of the parameters that are replicated on a mesh that could split them."""
        if all(self.sizes[axis] == 1 for axis in AXES if axis != DATA):
            return []
        names, leaves = jax.tree.leaves(paths(self.declared)), jax.tree.leaves(self.declared)
        return [
            (name, param)
            for name, param in zip(names, leaves, strict=True)
            if not any(self.axes(dim) for dim in param.names)
        ]


def with_default_dims(declared: Tree, sizes: Mapping[str, int]) -> Tree:
    """The declared parameters, with names for the dims that have none.

    Of a parameter of at least SPLIT_FROM values, the largest dim that the size of fsdp divides is named "embed", which
    the default rules split over fsdp; of equal dims the last one. No other dim is split.
    """
    parts = math.prod(sizes.get(axis, 1) for axis in FSDP_AXES)

    def named(param: Param) -> Param:
        if UNNAMED not in param.names:
            return param
        divisible = [i for i, size in enumerate(param.shape) if size % parts == 0 and param.names[i] == UNNAMED]
        large = divisible if param.size >= SPLIT_FROM and "embed" not in param.names else []
        best = max(large, key=lambda i: (param.shape[i], i), default=None)
        names = ["embed" if i == best else "_" if name == UNNAMED else name for i, name in enumerate(param.names)]
        return replace(param, dims=" ".join(names))

    return jax.tree.map(named, declared)


def fitting(size: int) -> str:
    """The numbers of parts, up to 64, that divide `size`, for a message."""
    return f"possible sizes: {', '.join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)}"


def zigzag_positions(length: int, parts: int) -> np.ndarray:
    """The positions 0 to length - 1 in zigzag order: those of part 0, part 1, ...; see `Layout.zigzag_order`."""
    if parts == 1:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * parts, -1)
    return np.concatenate([chunks[[s, 2 * parts - 1 - s]].reshape(-1) for s in range(parts)])


def split_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes that a spec names."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in cast(Iterable[Any], spec))
    return tuple(axis for entry in entries for axis in entry if axis)


def bytes_of(declared: Tree, dtype: str) -> int:
    """Bytes of all parameters in that dtype, or their own, padding included."""
    return sum(param.bytes(dtype) for param in jax.tree.leaves(declared))


def dtypes_of(declared: Tree, dtype: str) -> str:
    """The dtypes in which parameters are kept, as text; `dtype` is that of those without one of their own."""
    widths = jax.tree.leaves(mapped(lambda leaf: leaf.width if is_quantised(leaf) else leaf.kept_in(dtype), declared))
    return " and ".join(sorted(set(widths)))
