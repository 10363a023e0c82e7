"""Speed of one device: its published peak rates, and the fraction of them that each kind of work is assumed to
reach.
"""

from dataclasses import dataclass

from dtrain.core.chips import Chip

EFFICIENCY = {"product": 0.9, "memory": 0.9, "network": 0.9, "attention": 0.5, "grouped product": 0.7}
"""Fraction of the peak rate. `network` is for NVLink and between slices or hosts: the TPU link rates of the chip table
include it already."""

ON_GPU = {"product": 0.6, "grouped product": 0.47}
"""The same on GPUs, whose clocks fall under the load of matrix products. Fitted to published steps of dense models on
A100 and H100 (benchmarks/plan_vs_published.py); that of experts is scaled alike, not measured."""


@dataclass(frozen=True)
class Efficiency:
    """Predicts seconds of work on one device of a chip."""

    chip: Chip

    def computing(self, kind: str, flops: float) -> float:
        """Seconds of FLOPs of a kind: "product", "attention" or "grouped product"."""
        reached = (EFFICIENCY | (ON_GPU if self.chip.platform == "gpu" else {}))[kind]
        return flops / (reached * self.chip.flops_per_device)

    def moving(self, size: float) -> float:
        """Seconds to move `size` bytes to or from main memory."""
        return size / (EFFICIENCY["memory"] * self.chip.bandwidth / self.chip.devices)
