"""The device mesh: its axes, their sizes, the dims that each axis splits, and the order of devices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated, Literal, get_args

import jax
import numpy as np
from annotated_types import Ge, Le
from jax.sharding import AxisType

from dtrain.core.errors import FieldError
from dtrain.core.types import Device, Positive

Axis = Literal["pipeline", "data", "fsdp", "sequence", "expert", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""In order of communication: the first axes communicate least and may cross the slow network between slices."""
PIPELINE, DATA, FSDP, SEQUENCE, EXPERT, TENSOR = AXES

SPLITS = dict(zip(AXES, ("layers", "examples", "examples", "tokens", "experts", "matrices"), strict=True))
"""What each axis splits, for messages; every model has examples."""

FSDP_AXES: tuple[str, ...] = ("fsdp", "fsdp_y", "fsdp_z")
"""The axes that split parameters only to save memory; parameters are all-gathered before use (FSDP).

`fsdp` is one axis in a recipe. If it covers several dimensions of a TPU's torus, it becomes one mesh axis per
dimension: XLA compiles a reduce-scatter over all of them at once into a full all-reduce, but one after the other into
reduce-scatters with half the traffic.
"""

JAX_AXES = tuple(name for axis in AXES for name in (FSDP_AXES if axis == FSDP else (axis,)))
"""The axes of the `jax.sharding.Mesh`."""

BATCH_AXES: tuple[str, ...] = (PIPELINE, DATA, *FSDP_AXES, EXPERT)
"""The axes that split the examples of a batch."""

RULES: Mapping[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "length": (SEQUENCE,),
    "tokens": (SEQUENCE, TENSOR),
    "kept": (TENSOR,),
    "layer": (PIPELINE,),
    "experts": (EXPERT,),
    "embed": FSDP_AXES,
    "hidden": (TENSOR,),
    "heads": (TENSOR,),
    "kv_heads": (TENSOR,),
    "vocab": (TENSOR,),
}
"""The axes that split a dim of that name. A dim without a rule is not split. Between layers, activations are split by
`tokens`: `length`, and within it over tensor, by the rule `kept`."""

Rule = Literal["fsdp", "tensor", "replicated"]
"""fsdp: split to save memory, gathered before use; tensor: split together with the work; replicated: not split."""

FIXED = ("batch", "length", "tokens", "kept", "layer", "experts")
"""Dims whose rules a recipe cannot change: the engines depend on them."""

Size = Annotated[int, Ge(-1), Le(2**20)]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The size of each mesh axis; one of them may be -1: it takes the remaining devices."""

    pipeline: Size = 1
    """Pipeline stages: parts of the stack of layers, through which microbatches pass."""
    data: Size = -1
    """Data parallelism: copies of the model, each with its own examples."""
    fsdp: Size = 1
    """Fully sharded data parallelism: parts of parameters and optimizer state; each part also has its own examples."""
    sequence: Size = 1
    """Parts of every row of tokens, with ring attention."""
    expert: Size = 1
    """Expert parallelism: parts of the experts of a mixture; each part also has its own examples."""
    tensor: Size = 1
    """Tensor parallelism: parts of every layer's matrices."""
    slices: dict[Axis, Positive] = field(default_factory=dict)
    """How many slices an axis crosses: {data: 2} for two slices joined by the slow network. By default, `data` crosses
    all TPU slices."""
    rules: dict[str, Rule] = field(default_factory=dict)
    """Rules for further dims, or in place of the default ones: {classes: fsdp, kv_heads: replicated}."""

    def __post_init__(self) -> None:
        sizes = [getattr(self, axis) for axis in AXES]
        if 0 in sizes:
            raise FieldError(AXES[sizes.index(0)], "an axis has at least one device; found 0", "use 1 to turn it off")
        if sizes.count(-1) > 1:
            hint = "data is -1 unless it is set: give one of the two a size" if self.data == -1 else ""
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
        """The size of each axis; for the axis of size -1 its smallest size: its slices, or 1."""
        asked: dict[Axis, int] = {axis: getattr(self, axis) for axis in AXES}
        least = {axis: size if size > 0 else self.slices.get(axis, 1) for axis, size in asked.items()}
        return dict.fromkeys(JAX_AXES, 1) | least

    @property
    def least(self) -> int:
        """The fewest devices that this mesh fits on."""
        return math.prod(self.given.values())

    @property
    def exact(self) -> bool:
        """Whether no axis is -1."""
        return all(getattr(self, axis) > 0 for axis in AXES)

    def sizes(self, devices: int) -> dict[str, int]:
        """Every axis with its size on that many devices; raises FieldError if they do not fit."""
        if devices % self.least or (self.exact and devices != self.least):
            relation = "!=" if self.exact else "does not divide"
            hint = f"set one axis to -1 to fill it, or use {self.least} devices (`run --devices` fakes them)"
            raise FieldError("", f"{self._product()}: {self.least} {relation} {devices} devices", hint)
        fill = devices // self.least
        return self.given | {axis: fill * self.given[axis] for axis in AXES if getattr(self, axis) == -1}

    def jax_sizes(self, devices: Sequence[object]) -> dict[str, int]:
        """Every axis of the `jax.sharding.Mesh` with its size on these devices."""
        sizes = self.sizes(len(devices))
        return sizes | _fsdp_per_torus_dim(sizes[FSDP], devices)

    def table(self) -> dict[str, tuple[str, ...]]:
        """The default rules, overridden by the recipe's."""
        axes: dict[Rule, tuple[str, ...]] = {"fsdp": FSDP_AXES, "tensor": (TENSOR,), "replicated": ()}
        return {**RULES, **{dim: axes[rule] for dim, rule in self.rules.items()}}

    def crossed(self, sizes: Mapping[str, int], devices: Sequence[Device]) -> Mapping[str, int]:
        """How many slices each axis crosses: as the recipe sets it, else all along `data`; FieldError if impossible."""
        count = len({getattr(device, "slice_index", 0) for device in devices})
        if self.slices or count == 1 or devices[0].platform != "tpu":
            return {**self.slices}
        if sizes[DATA] % count:
            divisible = [axis for axis, size in mesh_sizes(sizes).items() if size % count == 0]
            other = f", or set mesh.slices={{{divisible[0]}: {count}}}" if divisible else ""
            message = f"the devices are in {count} slices, and {count} does not divide data = {sizes['data']}"
            raise FieldError("slices", message, f"make mesh.data a multiple of {count}{other}")
        return {"data": count}

    def build(self, sizes: Mapping[str, int], devices: Sequence[object]) -> jax.sharding.Mesh:
        """The `jax.sharding.Mesh`, with devices ordered by their position in the network and by slice."""
        shape, types = tuple(sizes[axis] for axis in JAX_AXES), (AxisType.Auto,) * len(JAX_AXES)
        crossed = self.crossed(sizes, devices)
        across = tuple(crossed.get(axis, 1) for axis in JAX_AXES)
        if math.prod(across) == 1:
            return jax.sharding.Mesh(_placed(shape, devices), JAX_AXES, axis_types=types)
        inside = tuple(size // slices for size, slices in zip(shape, across, strict=True))
        placed = np.stack([_placed(inside, group) for group in _slices(devices, math.prod(across))])
        # Dims are (slices per axis ..., size within a slice per axis ...). Transpose to (slices, size within) for each
        # axis and merge the two: along an axis, the devices of one slice are adjacent.
        axes = len(JAX_AXES)
        order = [place for axis in range(axes) for place in (axis, axes + axis)]
        grid = placed.reshape(*across, *inside).transpose(order).reshape(shape)
        return jax.sharding.Mesh(grid, JAX_AXES, axis_types=types)


def mesh_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the recipe's axes, from those of the mesh: fsdp is the product of its axes."""
    return {axis: sizes[axis] for axis in AXES} | {FSDP: math.prod(sizes[axis] for axis in FSDP_AXES)}


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The axes that span more than one device, with their sizes: "fsdp 2 x tensor 4"."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "of one device"


def _fsdp_per_torus_dim(fsdp: int, devices: Sequence[Device]) -> dict[str, int]:
    """The sizes of MEMORY_AXES if `fsdp` covers several dimensions of a slice's torus fully; else empty."""
    if devices[0].platform != "tpu" or len({getattr(device, "slice_index", 0) for device in devices}) > 1:
        return {}
    extents = [len({device.coords[i] for device in devices}) for i in range(3)]
    network = [extent for extent in extents if extent > 1]
    for count in range(2, len(network) + 1):
        for part in combinations(network, count):
            if math.prod(part) == fsdp:
                return dict(zip(FSDP_AXES, part, strict=False))
    return {}


def _placed(shape: tuple[int, ...], devices: Sequence[Device]) -> np.ndarray:
    """The devices of one slice as an array of this shape; neighbours along an axis are close in the network."""
    from jax.experimental.mesh_utils import create_device_mesh

    try:
        return create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (NotImplementedError, TypeError, ValueError):  # JAX splits the sides of a torus only by powers of two
        if devices[0].platform != "tpu":
            raise
        return _in_blocks(shape, devices)


def _in_blocks(shape: tuple[int, ...], devices: Sequence[Device]) -> np.ndarray:
    """Assign to each axis a block of the torus whose sides divide those of the torus.

    The last axis, which communicates most, chooses first and gets adjacent devices; each axis prefers a block along
    many dims of the torus, and full dims, which have wrap-around links, so that its collectives use more links.
    """
    places = [(*device.coords, getattr(device, "core_on_chip", 0)) for device in devices]
    torus = [max(column) + 1 for column in zip(*places, strict=True)]
    grid = np.empty(torus, dtype=object)
    for place, device in zip(places, devices, strict=True):
        grid[place] = device
    remaining, blocks = list(torus), []
    for size in reversed(shape):
        block = max(_blocks(size, remaining), key=lambda sides: (_lanes(sides, torus), -sum(sides)))
        remaining = [side // taken for side, taken in zip(remaining, block, strict=True)]
        blocks.insert(0, block)
    # Split each torus dim into its sides for all axes, the last axis fastest: dims (torus dim, axis). Then transpose
    # to (axis, torus dim) and merge the torus dims of each axis.
    split = grid.reshape([side for sides in zip(*blocks, strict=True) for side in sides])
    order = [dim * len(shape) + axis for axis in range(len(shape)) for dim in range(len(torus))]
    return split.transpose(order).reshape(shape)


def _blocks(size: int, within: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every block of `size` devices whose sides divide `within`."""
    if not within:
        yield from [()] if size == 1 else []
        return
    for side in range(1, size + 1):
        if size % side == 0 and within[0] % side == 0:
            yield from ((side, *rest) for rest in _blocks(size // side, within[1:]))


def _lanes(block: Sequence[int], torus: Sequence[int]) -> int:
    """Links per device that collectives on the block can use: one per dim, two where it wraps around the torus."""
    return sum((side > 1) + (side == whole > 1) for side, whole in zip(block, torus, strict=True))


def _slices(devices: Sequence[Device], count: int) -> list[list[Device]]:
    """The devices of each slice. Devices without a slice index are divided into consecutive runs of equal length."""
    indices = {getattr(device, "slice_index", -1) for device in devices}
    if -1 in indices or len(indices) == 1:
        size = len(devices) // count
        return [list(devices[i * size : (i + 1) * size]) for i in range(count)]
    if len(indices) != count:
        hint = f"set mesh.slices so that its product is {len(indices)}"
        raise FieldError("slices", f"the mesh crosses {count} slices; the devices are in {len(indices)}", hint)
    return [[device for device in devices if device.slice_index == index] for index in sorted(indices)]
