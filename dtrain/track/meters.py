"""Rates that are worked out from a step's time."""

from dataclasses import dataclass
from typing import Any

import jax

from dtrain.core.chips import chip_of


@dataclass(frozen=True)
class Meters:
    """What one step is worth: its examples, its FLOPs by a named convention, the devices' peak."""

    examples: int
    tokens: int
    """Tokens of an example; 0 where it has none."""
    flops: float
    peak: float | None
    """FLOP/s of all devices together, or None where it is not known."""

    def rates(self, values: dict[str, float]) -> dict[str, float]:
        """The values with examples per second, MFU where a peak is known, and memory where it is told."""
        seconds = values["time/step_ms"] / 1e3
        found = {"rate/examples_per_s": self.examples / seconds}
        if self.tokens:
            found["rate/tokens_per_s"] = self.examples * self.tokens / seconds
        if self.peak:
            found["rate/mfu"] = self.flops / seconds / self.peak
        return values | found | _memory()


def peak_of(devices: list[Any]) -> float | None:
    """Peak dense bfloat16 FLOP/s of the devices together, or None where the table has no figure."""
    chip = chip_of(devices[0].device_kind)
    return chip.flops_per_device * len(devices) if chip else None


def _memory() -> dict[str, float]:
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        return {}
    peak, limit = stats["peak_bytes_in_use"], stats.get("bytes_limit", 0)
    return {"memory/peak_bytes": float(peak)} | ({"memory/peak_fraction": peak / limit} if limit else {})
