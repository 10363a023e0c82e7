"""One table of facts about chips. Sources stand beside each family."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip: peak dense bfloat16 FLOP/s, HBM bytes, HBM bytes/s, and how JAX names it."""

    name: str
    flops: float
    hbm: float
    bandwidth: float
    kinds: tuple[str, ...]
    devices: int = 1

    @property
    def flops_per_device(self) -> float:
        """Peak FLOP/s of one JAX device; a chip may show as several."""
        return self.flops / self.devices


CHIPS = (
    # docs.cloud.google.com/tpu/docs: one page for each generation
    Chip(name="v4", flops=275e12, hbm=32e9, bandwidth=1200e9, kinds=("TPU v4",)),
    Chip(name="v5e", flops=197e12, hbm=16e9, bandwidth=819e9, kinds=("TPU v5 lite", "TPU v5e")),
    Chip(name="v5p", flops=459e12, hbm=95e9, bandwidth=2765e9, kinds=("TPU v5", "TPU v5p")),
    Chip(name="v6e", flops=918e12, hbm=32e9, bandwidth=1638e9, kinds=("TPU v6 lite", "TPU v6e")),
    Chip(name="tpu7x", flops=2307e12, hbm=192e9, bandwidth=7380e9, kinds=("TPU7x",), devices=2),
    # vendor data sheets, dense figures, SXM boards
    Chip(name="a100-40g", flops=312e12, hbm=40e9, bandwidth=1555e9, kinds=("A100-SXM4-40GB",)),
    Chip(name="a100-80g", flops=312e12, hbm=80e9, bandwidth=2039e9, kinds=("A100-SXM4-80GB",)),
    Chip(name="h100", flops=989.4e12, hbm=80e9, bandwidth=3350e9, kinds=("H100 80GB HBM3",)),
    Chip(name="h200", flops=989.4e12, hbm=141e9, bandwidth=4800e9, kinds=("H200",)),
    Chip(name="b200", flops=2250e12, hbm=180e9, bandwidth=8000e9, kinds=("B200",)),
)


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind`, or None where no peak is known."""
    name = device_kind.removeprefix("NVIDIA ")
    return next((chip for chip in CHIPS if name in chip.kinds), None)
