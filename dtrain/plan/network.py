"""What a collective costs on a network: which devices take part, over how many links, in how long.

A group that spans dimensions of a TPU's torus can send along all of them at once, or along one ring that
passes through all: the compiled text names the algorithm. A ring takes (n - 1) / n of the bytes over each
device's links. Slices and hosts are joined by the slow network.
Figures are nine tenths of the published one-way rates of a link (jax-ml/scaling-book, tpus.md),
and a microsecond for each hop of the longest ring.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtrain.core.chips import Chip
from dtrain.plan.efficiency import EFFICIENCY
from dtrain.plan.program import Op

HOP, NVLINK_START, FAR_START = 1e-6, 5e-6, 50e-6
"""Seconds before the first byte arrives: over one link of a torus, through NVLink, and between slices or hosts."""


@dataclass(frozen=True)
class Group:
    """Devices that talk to each other: how many, along which axes of the mesh, over which dims of the torus."""

    size: int
    axes: tuple[str, ...]
    extents: tuple[int, ...]
    """The extent of the group along each dimension of the torus that it spans."""
    rings: tuple[int, ...] = ()
    """Those of the extents that close to a ring: whole dimensions do, parts of one do not."""
    slices: int = 1


@dataclass(frozen=True)
class Network:
    """The devices of a mesh in its order: where each stands on the torus, and in which slice."""

    chip: Chip
    shape: tuple[int, ...]
    """The torus of one slice; () where devices are joined all to all."""
    axes: Mapping[str, int]
    """The mesh: its axes with their sizes."""
    coords: np.ndarray
    """(devices, 3), in the order of the mesh."""
    slice_of: np.ndarray
    """(devices,): the slice, or for GPUs the host, of each."""

    def group(self, members: Sequence[int]) -> Group:
        """What is to be known of these devices, by their number in the mesh."""
        places = np.array(np.unravel_index(list(members), tuple(self.axes.values())))
        spread = [len(set(row)) > 1 for row in places]
        axes = tuple(name for name, wide in zip(self.axes, spread, strict=True) if wide)
        coords, slices = self.coords[list(members)], len(set(self.slice_of[list(members)]))
        spans = [(len(set(coords[:, dim])), dim) for dim in range(coords.shape[1])]
        extents = tuple(extent for extent, _ in spans if extent > 1)
        rings = tuple(extent for extent, dim in spans if extent > 1 and self._closed(extent, dim))
        return Group(len(members), axes, extents, rings, slices)

    def along(self, axes: Sequence[str]) -> Group:
        """What is to be known of the devices along these axes."""
        numbers = np.arange(self.devices).reshape(tuple(self.axes.values()))
        corner = tuple(slice(None) if axis in axes else 0 for axis in self.axes)
        return self.group([int(number) for number in numbers[corner].reshape(-1)])

    def time(self, kind: str, group: Group, size: float, dims: int | None = None) -> float:
        """Seconds of one collective. `size` is what is gathered, or what is to be reduced, in bytes.

        `dims` is the number of dimensions of the torus that its algorithm uses at once; None for all of the group's.
        """
        if group.size == 1:
            return 0.0
        if group.slices > 1:
            return self._across(kind, group, size, dims)
        return self._inside(kind, group.size, group, size, dims)

    def _inside(self, kind: str, n: int, group: Group, size: float, dims: int | None) -> float:
        if n == 1:
            return 0.0
        spans = len(group.extents)
        used = min(dims or spans, spans)
        share, hops = size * (n - 1) / n, (n if used == 1 else sum(group.extents)) * HOP
        if not self.shape:  # NVLink: every GPU of a host to every other
            rate = EFFICIENCY["network"] * self.chip.link
            return (2 if kind == "all-reduce" else 1) * share / rate + NVLINK_START
        if kind == "collective-permute":
            return size / self.chip.link + HOP
        if kind in ("all-to-all", "ragged-all-to-all"):
            longest = max(group.extents, default=2)
            return size * longest / ((8 if longest in group.rings else 4) * self.chip.link) + hops
        lanes = spans + len(group.rings) or 2  # a ring sends both ways; a line's end has one neighbour
        lanes = 2 * used if used < spans else lanes  # one ring through several dimensions closes within them
        return (2 if kind == "all-reduce" else 1) * share / (lanes * self.chip.link) + hops

    def _closed(self, extent: int, dim: int) -> bool:
        return dim < len(self.shape) and extent == self.shape[dim] and extent % self.chip.wraps == 0

    def _across(self, kind: str, group: Group, size: float, dims: int | None) -> float:
        """Inside each slice first, then the slices' parts over the slow network."""
        inner = group.size // group.slices
        within = self._inside(kind, inner, group, size, dims)
        moved = size / inner * (group.slices - 1) / group.slices
        return within + self.far((2 if kind == "all-reduce" else 1) * moved)

    def far(self, size: float) -> float:
        """Seconds that bytes take to another slice or host."""
        return size / (EFFICIENCY["network"] * self.chip.far) + FAR_START

    @cached_property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.axes.values())


def dims_used(op: Op) -> int | None:
    """Dimensions of a torus that the compiler's algorithm for this collective uses at once; None where not named.

    A gather's emitter starts with the number (`1DAllGatherOnMajorDim`); a strategy of rings lists the extents
    of one ring's phases (`cores:{4 4}`).
    """
    emitter = re.search(r'"emitter":"(\d)D', op.attributes)
    if emitter:
        return int(emitter.group(1))
    phases = re.search(r"\bcores:\{([\d ]+)\}", op.attributes)
    return len(phases.group(1).split()) if phases else None


def members(op: Op) -> list[int] | None:
    """The first group of a collective, as numbers of devices; None where all take part."""
    text = op.attributes
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", text)
    if pairs:
        return [int(pairs.group(1)), int(pairs.group(2))]
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    if listed:
        return [int(number) for number in listed.group(1).split(",")]
    iota = re.search(rf"replica_groups=(\[\d+,\d+\])<={ORDER}", text)
    if iota:
        groups, size = _numbers(iota.group(1))
        return [int(number) for number in _ordered(iota.group(2), iota.group(3)).reshape(groups, size)[0]]
    named = re.search(rf"replica_groups=mesh(\[[^\]]*\])(?:, device_ids=\({ORDER}\))?\s*\{{([^}}]*)\}}", text)
    if named is None:
        return None
    found = _of_axes(named.group(1), named.group(4))
    order = _ordered(named.group(2), named.group(3)) if named.group(2) else None
    return [int(place) if order is None else int(order[place]) for place in found]


ORDER = r"(\[[\d,]+\])(?:T(\([\d,]+\)))?"
"""`[4,16]T(1,0)`: the numbers from 0 on as an array of that shape, transposed."""


def _ordered(shape: str, permutation: str | None) -> np.ndarray:
    dims = _numbers(shape)
    grid = np.arange(math.prod(dims)).reshape(dims)
    return (grid.transpose(_numbers(permutation)) if permutation else grid).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _of_axes(mesh: str, wanted: str) -> np.ndarray:
    """Places along some axes, or parts of axes, of a mesh that the text spells out."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    strides = dict(zip(sizes, np.cumprod([1, *reversed(sizes.values())])[:-1][::-1], strict=True))
    found = np.zeros(1, int)
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", wanted):
        count = int(part) if part else sizes[name]
        stride = strides[name] * (sizes[name] // (int(before) * count) if part else 1)
        found = (found[:, None] + stride * np.arange(count)[None, :]).reshape(-1)
    return found
