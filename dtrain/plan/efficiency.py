"""How fast one device works: its published peaks, and the part of them that each kind of work is taken to reach."""

from dataclasses import dataclass

from dtrain.core.chips import Chip

EFFICIENCY = {"product": 0.9, "memory": 0.9, "network": 0.9, "attention": 0.5, "grouped product": 0.7}
"""Of `network`, of NVLink and between slices; the table of chips has the links of TPUs at this figure already."""


@dataclass(frozen=True)
class Efficiency:
    """Seconds of work on one device of a chip."""

    chip: Chip

    def computing(self, kind: str, flops: float) -> float:
        """Floating-point work of a kind: "product", "attention" or "grouped product"."""
        return flops / (EFFICIENCY[kind] * self.chip.flops_per_device)

    def moving(self, size: float) -> float:
        """Bytes to or from main memory."""
        return size / (EFFICIENCY["memory"] * self.chip.bandwidth / self.chip.devices)
