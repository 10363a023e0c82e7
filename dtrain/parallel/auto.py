"""The engine `auto`: `jit`, or `shard_map` where plans of programs that were compiled for the chip find it faster."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from dtrain.core.chips import Chip
from dtrain.parallel.engine import EngineSection
from dtrain.parallel.jit import Jit
from dtrain.parallel.mesh import DATA, FSDP
from dtrain.parallel.rules import Layout
from dtrain.parallel.shard_map import ShardMap

SMALL, TOKENS = range(16, 33), 4096
"""Devices of slices with links in two dims, and SparseCores (v6e), on which programs of shard_map are the faster ones
from so many tokens a device on. With fewer devices or tokens, products that wait for parts of a matrix hide the gathers
of jit; with more devices, its programs have none of these."""


@dataclass(frozen=True, kw_only=True)
class Auto(EngineSection):
    """jit; for language models over fsdp on v4, v5p, TPU7x and small slices of v6e shard_map: docs/plan.md."""

    kind: Literal["auto"] = "auto"

    def on(self, layout: Layout, chip: Chip | None, devices: int, *, tokens: float) -> Jit | ShardMap:
        jit, explicit = self.choices.values()
        small = chip is not None and chip.sparse_offload and devices in SMALL and tokens >= TOKENS
        faster = chip is not None and (chip.dims == 3 or small)
        used = {axis for axis, size in layout.sizes.items() if size > 1}
        over_fsdp = FSDP in used and used <= {DATA, FSDP}
        return explicit if tokens and faster and over_fsdp and not explicit.refusal(layout) else jit

    @property
    def choices(self) -> dict[str, Any]:
        own = {one.name: getattr(self, one.name) for one in fields(EngineSection)}
        return {engine.kind: engine for engine in (Jit(**own), ShardMap(**own))}

    def refusal(self, layout: Layout) -> str:
        return Jit().refusal(layout)


def others(layout: Layout) -> str:
    """What to do where an engine refuses this layout: the engines that do not."""
    fitting = [name for name, engine in Auto().choices.items() if not engine.refusal(layout)]
    return f"use engine: {' or '.join(fitting)}" if fitting else "use another mesh, or leave mesh.rules out"
