"""Which collectives a compiler overlaps with work: rules for the quick tier, which has no schedule to read.

The rules for TPUs were read from 43 programs that libtpu 0.0.42 scheduled: decoders of 0.1 to 47 billion parameters on
1 to 256 chips of v5e and v6e, and on 64 of v5p. 41 of the quick steps are within 15% of those of the schedule. Two are
26% and 58% too short: programs that fill the memory, where the compiler overlaps less.
  - All-gathers of parameters overlap with the matrix products of the same loop body on v5e, elsewhere by an option,
    and by another with kernels.
  - Reduce-scatters are exposed, and become all-reduces if they span several dimensions of a torus.
  - A windowed product (collective matmul) is split to use the parts of its operand as they arrive: network and product
    overlap, and what is too large for fast memory is moved again for every two parts. On v5e-32 the permutations are
    synchronous.
  - An all-gather over a part of a torus of several dimensions uses one ring.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dtrain.core.chips import Chip
from dtrain.parallel.engine import SCHEDULED, Compiler
from dtrain.parallel.mesh import FSDP_AXES
from dtrain.plan.network import Group

ASYNC_GATHER = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
WITH_KERNELS = "xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call"
WINDOW_GATHERS = "xla_tpu_enable_windowed_einsum_for_all_gather"
WINDOW_FROM = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
WHOLE_FROM = 10_000
"""Threshold in MiB of an operand from which no product is split in practice."""

MOST_DEVICES = 32
"""Devices of a mesh up to which products are split, whatever the sizes of its axes: programs for 8, 16 and 32 devices
have such products, those for 64, 128 and 256 have none."""


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
    waits: bool = False
    """Permutations are synchronous: each waits for the one before, so that the links of one direction are idle."""
    queued: bool = False
    """Collectives run one after another beside the work, in the order of the program (GPUs)."""
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


def overlap(engine: Compiler, placed_by_compiler: bool, chip: Chip, devices: int) -> Overlap:
    """Rules for an engine's compiler and options on a chip.

    `placed_by_compiler`: the compiler inserts the collectives (engine jit). `devices`: those of the whole mesh.
    """
    options: Mapping[str, bool | str] = engine.options(chip.platform)
    if chip.platform == "gpu":
        hidden = _on(options, SCHEDULED)
        return Overlap(hidden, hidden and not placed_by_compiler, kernels=True, queued=True)
    split = placed_by_compiler and chip.dims == 2 and devices <= MOST_DEVICES
    if split and int(options.get(WINDOW_FROM, 0)) < WHOLE_FROM:
        waits = chip.name == "v5e" and devices == MOST_DEVICES
        return Overlap(not waits, not waits, windowed=_on(options, WINDOW_GATHERS, default=True), waits=waits)
    gathers, kernels = chip.name == "v5e" or _on(options, ASYNC_GATHER), _on(options, WITH_KERNELS)
    return Overlap(gathers, False, kernels=kernels, scattered=not placed_by_compiler)


def _on(options: Mapping[str, bool | str], name: str, *, default: bool = False) -> bool:
    """Whether an option is set to true; as text it may be `false` or `0`."""
    return str(options.get(name, default)).lower() not in ("false", "0")
