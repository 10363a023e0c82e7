"""The engine `auto`: `jit`, or `shard_map` where plans of programs that were compiled for the chip find it faster."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from dtrain.core.chips import Chip
from dtrain.parallel.engine import Compiler
from dtrain.parallel.jit import Jit
from dtrain.parallel.mesh import DATA, FSDP
from dtrain.parallel.rules import Layout
from dtrain.parallel.shard_map import ShardMap

SMALL = range(16, 33)
"""Devices of slices with links in two dims, and SparseCores (v6e), on which programs of shard_map are the faster ones.
With fewer, products that wait for parts of a matrix hide the gathers of jit; with more, its programs have none of
these."""


@dataclass(frozen=True, kw_only=True)
class Auto(Compiler):
    """jit; for language models over fsdp on v4, v5p, TPU7x and small slices of v6e shard_map, which is faster there."""

    kind: Literal["auto"] = "auto"

    def on(self, layout: Layout, chip: Chip | None, devices: int, *, compared: bool) -> Jit | ShardMap:
        jit, explicit = self.choices
        faster = chip is not None and (chip.dims == 3 or (chip.sparse_offload and devices in SMALL))
        used = {axis for axis, size in layout.sizes.items() if size > 1}
        over_fsdp = FSDP in used and used <= {DATA, FSDP}
        return explicit if compared and faster and over_fsdp and not explicit.refusal(layout) else jit

    @property
    def choices(self) -> tuple[Jit, ShardMap]:
        own = {one.name: getattr(self, one.name) for one in fields(Compiler)}
        return Jit(**own), ShardMap(**own)

    def refusal(self, layout: Layout) -> str:
        return self.choices[0].refusal(layout)

    def overlapped(self, platform: str, chip: Chip | None) -> Any:
        raise TypeError("auto is another engine on each chip: ask the one of `on`")
