"""Which collectives a compiler hides behind work, for the quick tier, which has no schedule to read.

What holds for TPUs was read from programs that libtpu 0.0.42 scheduled: gathers of parameters run beside the
products of the same loop body, kernels carry none; reduce-scatters are waited for, and over several dimensions of
a torus they are whole all-reduces. Where products are cut up to go with their operand's parts as they arrive
(windowed), network and products run together, and a result too large for fast memory is read and written again for
the parts. Gathers over a part of a torus of several dimensions go along one ring.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dtrain.core.chips import Chip
from dtrain.parallel.engine import Compiler
from dtrain.parallel.mesh import MEMORY_AXES
from dtrain.plan.network import Group

ASYNC_GATHER = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
WINDOW_FROM = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
WHOLE_FROM = 10_000
"""Mebibytes of an operand from which on no product is cut up in practice."""


@dataclass(frozen=True)
class Overlap:
    """What runs beside work in the body of a loop."""

    gathers: bool
    """Gathers of parameters."""
    sums: bool
    """Sums of their gradients."""
    kernels: bool = False
    """Kernels hide them as products do."""
    windowed: bool = False
    """Products are cut up to go with the parts of their operand as they arrive."""
    scattered: bool = True
    """A reduce-scatter over several dimensions of a torus stays one."""

    def hides(self, kind: str, axes: tuple[str, ...]) -> bool:
        """Whether a collective along these axes of the mesh needs no waiting where there is work enough."""
        if kind == "collective-permute":
            return True
        saving = set(axes) <= set(MEMORY_AXES)
        return saving and (self.gathers if kind == "all-gather" else self.sums and kind == "reduce-scatter")

    def dims(self, group: Group, torus: int) -> int | None:
        """Dimensions of the torus that a collective uses at once: all where its group is the whole torus, else one."""
        return None if len(group.rings) == len(group.extents) == torus else 1

    def kind(self, kind: str, group: Group) -> str:
        """The collective that the compiler makes of one."""
        whole = kind == "reduce-scatter" and len(group.extents) > 1 and not self.scattered
        return "all-reduce" if whole else kind


def overlap(engine: Compiler, placed_by_compiler: bool, chip: Chip) -> Overlap:
    """What to expect of an engine's compiler and options on a chip."""
    if chip.platform == "gpu":
        return Overlap(True, True, kernels=True)
    options: Mapping[str, bool | str] = engine.options("tpu")
    flat = chip.dims == 2
    if placed_by_compiler and flat and int(options.get(WINDOW_FROM, 0)) < WHOLE_FROM:
        return Overlap(True, True, windowed=True)
    return Overlap(flat or bool(options.get(ASYNC_GATHER)), False, scattered=not placed_by_compiler)
