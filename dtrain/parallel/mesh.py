"""The mesh: which axes there are, how large each is, and which dims each may split."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated, Any, Literal

import jax
import numpy as np
from annotated_types import Ge, Le
from jax.sharding import AxisType

from dtrain.core.errors import FieldError
from dtrain.core.types import Positive

Axis = Literal["pipeline", "data", "fsdp", "sequence", "expert", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "data", "fsdp", "sequence", "expert", "tensor")
"""From the axis that talks least, which may cross the slow network, to the one that talks most."""

MEMORY_AXES: tuple[str, ...] = ("fsdp", "fsdp_y", "fsdp_z")
"""The axes that split parameters only to save memory: made whole again before use.

`fsdp` is one axis to the user. Where it covers several dimensions of a TPU's network it is laid over
one mesh axis for each: a sum over all of them at once is compiled to a whole all-reduce, a sum along
one after the other to reduce-scatters of half the traffic.
"""

LAID: tuple[str, ...] = ("pipeline", "data", *MEMORY_AXES, "sequence", "expert", "tensor")
"""The axes of the mesh of JAX."""

BATCH_AXES: tuple[str, ...] = ("pipeline", "data", *MEMORY_AXES, "expert")
"""The axes that each hold their own examples."""

RULES: Mapping[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "length": ("sequence",),
    "tokens": ("sequence", "tensor"),
    "kept": ("tensor",),
    "layer": ("pipeline",),
    "experts": ("expert",),
    "embed": MEMORY_AXES,
    "hidden": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "vocab": ("tensor",),
}
"""Which axes split a dim of that name. A dim without a rule stays whole. `tokens` is `length`, and each
part of that `kept` by one of the devices that share a layer's matrices."""

Rule = Literal["fsdp", "tensor", "replicated"]
"""Split to save memory and gathered before use; split with the work; or the same on every device."""

FIXED = ("batch", "length", "tokens", "kept", "layer", "experts")
"""Dims whose axes the engines count on."""

Size = Annotated[int, Ge(-1), Le(2**20)]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The size of each mesh axis; one of them may be -1 and takes the devices that are left."""

    pipeline: Size = 1
    """Parts of the stack of layers; microbatches go from one to the next."""
    data: Size = -1
    """Copies of the model, each with its own examples."""
    fsdp: Size = 1
    """Parts of parameters and optimizer state; each part also has its own examples."""
    sequence: Size = 1
    """Parts of every row of tokens."""
    expert: Size = 1
    """Parts of the experts of a mixture; each part also has its own examples."""
    tensor: Size = 1
    """Parts of every layer's matrices."""
    slices: dict[Axis, Positive] = field(default_factory=dict)
    """How many slices an axis crosses: {data: 2} for two slices joined by the slow network. Left out, `data` crosses
    all slices of TPUs."""
    rules: dict[str, Rule] = field(default_factory=dict)
    """Further dims to split, or another rule for the known ones: {classes: fsdp, kv_heads: replicated}."""

    def __post_init__(self) -> None:
        sizes = [getattr(self, axis) for axis in AXES]
        if 0 in sizes:
            raise FieldError(AXES[sizes.index(0)], "an axis has at least one device; found 0", "use 1 to leave it out")
        if sizes.count(-1) > 1:
            hint = "give data a size, or leave the other to it" if self.data == -1 else ""
            raise FieldError(AXES[sizes.index(-1)], f"only one axis may be -1; found {self._product()}", hint)
        for dim, rule in self.rules.items():
            if dim in FIXED:
                raise FieldError(f"rules.{dim}", f"{dim} is always split by {' and '.join(RULES[dim])}")
            if dim == "_":
                raise FieldError("rules._", "_ names the dims that no rule may split")
            if dim == "embed" and rule == "tensor":
                raise FieldError("rules.embed", "embed is split by fsdp, or replicated; found tensor")
        for axis, slices in self.slices.items():
            size = getattr(self, axis)
            if size != -1 and size % slices:
                raise FieldError(f"slices.{axis}", f"{slices} slices do not divide {axis} = {size}")

    def _product(self) -> str:
        shown = [axis for axis in AXES if getattr(self, axis) != 1]
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in shown) or "one device"

    @property
    def given(self) -> dict[str, int]:
        """The size of each axis as far as it is said: its slices, or 1, for the one to be filled."""
        least = lambda axis: getattr(self, axis) if getattr(self, axis) > 0 else self.slices.get(axis, 1)  # noqa: E731
        return dict.fromkeys(LAID, 1) | {axis: least(axis) for axis in AXES}

    @property
    def least(self) -> int:
        """The fewest devices that this mesh fits on."""
        return math.prod(self.given.values())

    @property
    def exact(self) -> bool:
        """Whether no axis is left to be filled."""
        return all(getattr(self, axis) > 0 for axis in AXES)

    def sizes(self, devices: int) -> dict[str, int]:
        """Every axis with its size on that many devices; FieldError where they do not fit."""
        if devices % self.least or (self.exact and devices != self.least):
            relation = "!=" if self.exact else "does not divide"
            left, right = (self.least, devices)
            raise FieldError(
                "",
                f"{self._product()}: {left} {relation} {right} devices",
                f"set one axis to -1 to fill it, or run on {self.least} devices: --devices {self.least} pretends them",
            )
        fill = devices // self.least
        return self.given | {axis: fill * self.given[axis] for axis in AXES if getattr(self, axis) == -1}

    def laid(self, devices: Sequence[Any]) -> dict[str, int]:
        """Every axis of the mesh of JAX with its size on these devices."""
        sizes = self.sizes(len(devices))
        return sizes | _along_the_network(sizes["fsdp"], devices)

    def table(self) -> dict[str, tuple[str, ...]]:
        """The rules with the recipe's own over them."""
        axes: dict[Rule, tuple[str, ...]] = {"fsdp": MEMORY_AXES, "tensor": ("tensor",), "replicated": ()}
        return {**RULES, **{dim: axes[rule] for dim, rule in self.rules.items()}}

    def crossed(self, sizes: Mapping[str, int], devices: Sequence[Any]) -> Mapping[str, int]:
        """How many slices each axis crosses: as the recipe gives it, else all of them along `data`."""
        count = len({getattr(device, "slice_index", 0) for device in devices})
        if self.slices or count == 1 or devices[0].platform != "tpu":
            return {**self.slices}
        if sizes["data"] % count:
            able = [axis for axis, size in mesh_sizes(sizes).items() if size % count == 0]
            other = f", or set mesh.slices={{{able[0]}: {count}}}" if able else ""
            message = f"the devices are in {count} slices, and data = {sizes['data']} does not divide by {count}"
            raise FieldError("slices", message, f"make mesh.data a multiple of {count}{other}")
        return {"data": count}

    def build(self, sizes: Mapping[str, int], devices: Sequence[Any]) -> jax.sharding.Mesh:
        """The mesh of JAX, its devices placed by their position on the network and by slice."""
        shape, types = tuple(sizes[axis] for axis in LAID), (AxisType.Auto,) * len(LAID)
        crossed = self.crossed(sizes, devices)
        across = tuple(crossed.get(axis, 1) for axis in LAID)
        if math.prod(across) == 1:
            return jax.sharding.Mesh(_placed(shape, devices), LAID, axis_types=types)
        inside = tuple(size // slices for size, slices in zip(shape, across, strict=True))
        placed = np.stack([_placed(inside, group) for group in _slices(devices, math.prod(across))])
        order = [axis for pair in zip(range(len(LAID)), range(len(LAID), 2 * len(LAID)), strict=True) for axis in pair]
        grid = placed.reshape(*across, *inside).transpose(order).reshape(shape)
        return jax.sharding.Mesh(grid, LAID, axis_types=types)


def mesh_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the axes as a recipe names them."""
    return {axis: sizes[axis] for axis in AXES} | {"fsdp": math.prod(sizes[axis] for axis in MEMORY_AXES)}


def _along_the_network(fsdp: int, devices: Sequence[Any]) -> dict[str, int]:
    """The parts of `fsdp` along each dimension of a TPU's network, where it covers some of them fully."""
    if devices[0].platform != "tpu" or len({getattr(device, "slice_index", 0) for device in devices}) > 1:
        return {}
    extents = [len({device.coords[i] for device in devices}) for i in range(3)]
    network = [extent for extent in extents if extent > 1]
    for count in range(2, len(network) + 1):
        for part in combinations(network, count):
            if math.prod(part) == fsdp:
                return dict(zip(MEMORY_AXES, part, strict=False))
    return {}


def _placed(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    from jax.experimental.mesh_utils import create_device_mesh

    try:
        return create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (NotImplementedError, TypeError, ValueError):  # JAX splits the sides of a torus at powers of two only
        if devices[0].platform != "tpu":
            raise
        return _in_blocks(shape, devices)


def _in_blocks(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """Every axis on a block of the torus, the last first: along as many of its dims as can be, whole ones if any."""
    places = [(*device.coords, getattr(device, "core_on_chip", 0)) for device in devices]
    torus = [max(column) + 1 for column in zip(*places, strict=True)]
    grid = np.empty(torus, dtype=object)
    for place, device in zip(places, devices, strict=True):
        grid[place] = device
    left, blocks = list(torus), []
    for size in reversed(shape):
        block = max(_blocks(size, left), key=lambda sides: (_lanes(sides, torus), -sum(sides)))
        left = [side // taken for side, taken in zip(left, block, strict=True)]
        blocks.insert(0, block)
    split = grid.reshape([side for sides in zip(*blocks, strict=True) for side in sides])
    order = [dim * len(shape) + axis for axis in range(len(shape)) for dim in range(len(torus))]
    return split.transpose(order).reshape(shape)


def _blocks(size: int, within: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every block of that size whose sides divide those of the torus."""
    if not within:
        yield from [()] if size == 1 else []
        return
    for side in range(1, size + 1):
        if size % side == 0 and within[0] % side == 0:
            yield from ((side, *rest) for rest in _blocks(size // side, within[1:]))


def _lanes(block: Sequence[int], torus: Sequence[int]) -> int:
    return sum((side > 1) + (side == whole > 1) for side, whole in zip(block, torus, strict=True))


def _slices(devices: Sequence[Any], count: int) -> list[list[Any]]:
    """The devices of each slice; devices that know of no slice are cut into equal runs."""
    known = {getattr(device, "slice_index", -1) for device in devices}
    if -1 in known or len(known) == 1:
        size = len(devices) // count
        return [list(devices[i * size : (i + 1) * size]) for i in range(count)]
    if len(known) != count:
        hint = f"set mesh.slices so that its product is {len(known)}"
        raise FieldError("slices", f"the mesh crosses {count} slices; the devices are in {len(known)}", hint)
    return [[device for device in devices if device.slice_index == index] for index in sorted(known)]
