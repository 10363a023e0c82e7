"""Rates computed from the time of a step: examples/s, tokens/s and MFU."""

from dataclasses import dataclass

import jax

from dtrain.core.chips import chip_of
from dtrain.core.types import Device


@dataclass(frozen=True)
class Meters:
    """The work of one step and the peak of the devices, from which rates are computed."""

    examples: int
    """Examples in the global batch."""
    tokens: int
    """Tokens per example; 0 if it has none."""
    flops: float
    """Model FLOPs of one step."""
    peak: float | None
    """Peak FLOP/s of all devices together; None if unknown."""

    def rates(self, values: dict[str, float]) -> dict[str, float]:
        """Add examples/s, tokens/s, MFU if the peak is known, and memory if the device reports it, to the values."""
        seconds = values["time/step_ms"] / 1e3
        rates = {"rate/examples_per_s": self.examples / seconds}
        if self.tokens:
            rates["rate/tokens_per_s"] = self.examples * self.tokens / seconds
        if self.peak:
            rates["rate/mfu"] = self.flops / seconds / self.peak
        return values | rates | _memory()


def peak_of(devices: list[Device]) -> float | None:
    """Peak dense bfloat16 FLOP/s of the devices together; None if their chip is not in the chip table."""
    chip = chip_of(devices[0].device_kind)
    return chip.flops_per_device * len(devices) if chip else None


def _memory() -> dict[str, float]:
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        return {}
    peak, limit = stats["peak_bytes_in_use"], stats.get("bytes_limit", 0)
    return {"memory/peak_bytes": float(peak)} | ({"memory/peak_fraction": peak / limit} if limit else {})
