"""Which collectives a compiler overlaps with work: rules for the quick tier, which has no schedule to read.

The rules for TPUs were read from programs that libtpu 0.0.42 scheduled:
  - All-gathers of parameters overlap with the matrix products of the same loop body, and by an option with kernels.
  - Reduce-scatters are exposed, and become all-reduces if they span several dimensions of a torus.
  - A windowed product (collective matmul) is split to use the parts of its operand as they arrive: network and product
    overlap, and a result too large for fast memory is read and written again for the parts.
  - An all-gather over a part of a torus of several dimensions uses one ring.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dtrain.core.chips import Chip
from dtrain.parallel.engine import Compiler
from dtrain.parallel.mesh import FSDP_AXES
from dtrain.plan.network import Group

ASYNC_GATHER = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
WITH_KERNELS = "xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call"
WINDOW_GATHERS = "xla_tpu_enable_windowed_einsum_for_all_gather"
WINDOW_FROM = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
WHOLE_FROM = 10_000
"""Threshold in MiB of an operand from which no product is split in practice."""


@dataclass(frozen=True)
class Overlap:
    """Collectives that overlap with work in a loop body."""

    gathers: bool
    """All-gathers of parameters overlap."""
    sums: bool
    """Reduce-scatters of gradients overlap."""
    kernels: bool = False
    """Kernels hide collectives as matrix products do."""
    windowed: bool = False
    """Products are split to use the parts of their operand as they arrive."""
    scattered: bool = True
    """A reduce-scatter over several dimensions of a torus does not become an all-reduce."""

    def hides(self, kind: str, axes: tuple[str, ...]) -> bool:
        """Whether a collective along these axes of the mesh is hidden if there is enough work."""
        if kind == "collective-permute":
            return True
        saving = set(axes) <= set(FSDP_AXES)
        return saving and (self.gathers if kind == "all-gather" else self.sums and kind == "reduce-scatter")

    def dims(self, group: Group, torus: int) -> int | None:
        """Torus dimensions that a collective uses at once: None (all) if its group is the whole torus, else 1."""
        return None if len(group.rings) == len(group.extents) == torus else 1

    def kind(self, kind: str, group: Group) -> str:
        """The kind of collective that the compiler emits for this one."""
        whole = kind == "reduce-scatter" and len(group.extents) > 1 and not self.scattered
        return "all-reduce" if whole else kind


def overlap(engine: Compiler, placed_by_compiler: bool, chip: Chip) -> Overlap:
    """Rules for an engine's compiler and options on a chip.

    `placed_by_compiler`: the compiler inserts the collectives (engine jit).
    """
    if chip.platform == "gpu":
        return Overlap(True, True, kernels=True)
    options: Mapping[str, bool | str] = engine.options("tpu")
    flat = chip.dims == 2
    if placed_by_compiler and flat and int(options.get(WINDOW_FROM, 0)) < WHOLE_FROM:
        return Overlap(True, True, windowed=bool(options.get(WINDOW_GATHERS, True)))
    gathers, kernels = flat or bool(options.get(ASYNC_GATHER)), bool(options.get(WITH_KERNELS))
    return Overlap(gathers, False, kernels=kernels, scattered=not placed_by_compiler)
