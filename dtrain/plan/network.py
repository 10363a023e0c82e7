"""Time of a collective on a network: which devices take part, over how many links, for how long.

For an all-gather or a reduce-scatter of `size` bytes over n devices, with `lanes` links per device in use:

  seconds = size (n - 1) / n / (lanes * link rate) + hops * HOP

An all-reduce moves twice the bytes. A group that spans several dimensions of a TPU torus can use the links of all of
them at once, or one ring that passes through all of them: the compiled text names the algorithm. Slices and GPU hosts
are joined by a slower network: a collective runs within each slice, then across slices.

Link rates are nine tenths of the published one-way rates (jax-ml/scaling-book, tpus.md).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtrain.core.chips import Chip
from dtrain.plan.cost import EFFICIENCY
from dtrain.plan.program import Op

HOP, NVLINK_START, FAR_START = 1e-6, 5e-6, 50e-6
"""Latency in seconds: of one link of a torus, of NVLink, and between slices or hosts."""


@dataclass(frozen=True)
class Group:
    """Devices of one collective: how many, along which axes of the mesh, over which dimensions of the torus."""

    size: int
    axes: tuple[str, ...]
    extents: tuple[int, ...]
    """The extent of the group along each dimension of the torus that it spans."""
    rings: tuple[int, ...] = ()
    """Those of the extents that form closed rings: a whole dimension does, a part of one does not."""
    slices: int = 1


@dataclass(frozen=True)
class Network:
    """The devices of a mesh, in mesh order: the torus coordinates and the slice of each."""

    chip: Chip
    shape: tuple[int, ...]
    """Shape of one slice's torus; () if every device is linked to every other."""
    axes: Mapping[str, int]
    """Axes of the mesh, with their sizes."""
    coords: np.ndarray
    """(devices, 3), in the order of the mesh."""
    slice_of: np.ndarray
    """(devices,): number of the slice or, for GPUs, of the host."""

    def group(self, members: Sequence[int]) -> Group:
        """Group of these devices, given by their number in the mesh."""
        places = np.array(np.unravel_index(list(members), tuple(self.axes.values())))
        spread = [len(set(row)) > 1 for row in places]
        axes = tuple(name for name, wide in zip(self.axes, spread, strict=True) if wide)
        coords, slices = self.coords[list(members)], len(set(self.slice_of[list(members)]))
        spans = [(len(set(coords[:, dim])), dim) for dim in range(coords.shape[1])]
        extents = tuple(extent for extent, _ in spans if extent > 1)
        rings = tuple(extent for extent, dim in spans if extent > 1 and self._closed(extent, dim))
        return Group(len(members), axes, extents, rings, slices)

    def along(self, axes: Sequence[str]) -> Group:
        """Group of the devices along these axes of the mesh."""
        numbers = np.arange(self.devices).reshape(tuple(self.axes.values()))
        corner = tuple(slice(None) if axis in axes else 0 for axis in self.axes)
        return self.group([int(number) for number in numbers[corner].reshape(-1)])

    def time(self, kind: str, group: Group, size: float, dims: int | None = None) -> float:
        """Seconds of one collective. `size`: bytes of the gathered result, or of the operand to reduce.

        `dims`: number of torus dimensions that its algorithm uses at once; None for all of the group's.
        """
        if group.size == 1:
            return 0.0
        if group.slices > 1:
            return self._across(kind, group, size, dims)
        return self._inside(kind, group.size, group, size, dims)

    def _inside(self, kind: str, n: int, group: Group, size: float, dims: int | None) -> float:
        """Seconds of a collective over n devices of one slice or host."""
        if n == 1:
            return 0.0
        spans = len(group.extents)
        used = min(dims or spans, spans)
        share, hops = size * (n - 1) / n, (n if used == 1 else sum(group.extents)) * HOP
        if not self.shape:  # NVLink: every GPU of a host to every other
            rate = EFFICIENCY["network"] * self.chip.link_bandwidth
            return (2 if kind == "all-reduce" else 1) * share / rate + NVLINK_START
        if kind == "collective-permute":
            return size / self.chip.link_bandwidth + HOP
        if kind in ("all-to-all", "ragged-all-to-all"):
            # Bound by the bisection of the longest dimension: per n devices along it, n / 2 send half of their bytes
            # across, over 2 links in a ring (n size / 8 per link) or 1 on an open line (n size / 4).
            longest = max(group.extents, default=2)
            return size * longest / ((8 if longest in group.rings else 4) * self.chip.link_bandwidth) + hops
        lanes = spans + len(group.rings) or 2  # 2 directions of a ring; the end of a line has 1
        lanes = 2 * used if used < spans else lanes  # one ring through several dimensions is closed
        return (2 if kind == "all-reduce" else 1) * share / (lanes * self.chip.link_bandwidth) + hops

    def _closed(self, extent: int, dim: int) -> bool:
        return dim < len(self.shape) and extent == self.shape[dim] and self.chip.closed(self.shape)[dim]

    def _across(self, kind: str, group: Group, size: float, dims: int | None) -> float:
        """Seconds within each slice, then of each device's part over the slow network."""
        inner = group.size // group.slices
        within = self._inside(kind, inner, group, size, dims)
        moved = size / inner * (group.slices - 1) / group.slices
        return within + self.between_slices((2 if kind == "all-reduce" else 1) * moved)

    def between_slices(self, size: float) -> float:
        """Seconds to send `size` bytes to another slice or host."""
        return size / (EFFICIENCY["network"] * self.chip.network_bandwidth) + FAR_START

    @cached_property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.axes.values())


def dims_used(op: Op) -> int | None:
    """Number of torus dimensions that the compiler's algorithm for a collective uses at once; None if not named.

    The emitter of an all-gather starts with it (`1DAllGatherOnMajorDim`); a ring strategy lists the extents of the
    phases of one ring (`cores:{4 4}`).
    """
    emitter = re.search(r'"emitter":"(\d)D', op.attributes)
    if emitter:
        return int(emitter.group(1))
    phases = re.search(r"\bcores:\{([\d ]+)\}", op.attributes)
    return len(phases.group(1).split()) if phases else None


def members(op: Op) -> list[int] | None:
    """Device numbers of a collective's first group; None if all devices take part."""
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
    positions = _of_axes(named.group(1), named.group(4))
    order = _ordered(named.group(2), named.group(3)) if named.group(2) else None
    return [int(place) if order is None else int(order[place]) for place in positions]


ORDER = r"(\[[\d,]+\])(?:T(\([\d,]+\)))?"
"""`[4,16]T(1,0)`: the numbers 0, 1, 2, ... as an array of that shape, transposed."""


def _ordered(shape: str, permutation: str | None) -> np.ndarray:
    dims = _numbers(shape)
    grid = np.arange(math.prod(dims)).reshape(dims)
    return (grid.transpose(_numbers(permutation)) if permutation else grid).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _of_axes(mesh: str, axes: str) -> np.ndarray:
    """Positions along some axes of a mesh, as the text lists them: `'fsdp'`, or a part of an axis, `'fsdp':(2)4`.

    `:(before)count` is the sub-axis of size `count` that follows `before` on the axis, major to minor.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    strides = dict(zip(sizes, np.cumprod([1, *reversed(sizes.values())])[:-1][::-1], strict=True))
    positions = np.zeros(1, int)
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes):
        count = int(part) if part else sizes[name]
        stride = strides[name] * (sizes[name] // (int(before) * count) if part else 1)
        positions = (positions[:, None] + stride * np.arange(count)[None, :]).reshape(-1)
    return positions
