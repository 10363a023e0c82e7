"""The chip table: speed, memory, network bandwidth, available slice shapes and prices."""

import math
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from itertools import product
from typing import Literal

GIB = 2**30
PER_HOST = 8
"""GPUs per host, connected by NVLink."""
PRICED = date(2025, 10, 1)
"""Date of the prices: Google Cloud on-demand list prices in its cheapest US region, in US dollars per chip and hour.
List prices change and contracts differ: `--price` overrides them."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """GPU properties that XLA needs to compile for a GPU that is not attached."""

    capability: int
    """Major version of the compute capability."""
    multiprocessors: int
    """Streaming multiprocessors (SMs)."""
    fpus: int
    """float32 lanes per SM."""
    shared: int
    """Bytes of shared memory per SM."""
    clock: float
    """Clock rate in Hz."""
    l2: int
    """Bytes of L2 cache."""


AMPERE = Gpu(capability=8, multiprocessors=108, fpus=64, shared=164 * 2**10, clock=1.41e9, l2=40 * 2**20)
HOPPER = Gpu(capability=9, multiprocessors=132, fpus=128, shared=228 * 2**10, clock=1.98e9, l2=50 * 2**20)
BLACKWELL = Gpu(capability=10, multiprocessors=148, fpus=128, shared=228 * 2**10, clock=1.965e9, l2=126 * 2**20)


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """The names of a chip in Google Cloud and SkyPilot."""

    label: str
    """Accelerator label of its GKE nodes."""
    machine: str = ""
    """Machine type that `price` refers to: for TPUs the four-chip host of a multi-host slice, for GPUs the machine
    with eight GPUs."""
    sold: tuple[int, ...] = ()
    """Available numbers of GPUs per machine in this family: a3-highgpu-1g, -2g, -4g, -8g."""
    accelerator: str = ""
    """Prefix of its accelerator types in the TPU API; empty if the TPU API does not offer it."""
    runtime: str = ""
    """Runtime version (VM image) for it in the TPU API."""
    sky: str = ""
    """SkyPilot's name of a GPU; for a TPU the name is `tpu-` plus `accelerator`."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip: peak dense bfloat16 FLOP/s, HBM in bytes, HBM bandwidth in bytes/s, its names in JAX and the cloud."""

    name: str
    flops: float
    hbm: float
    bandwidth: float
    kinds: tuple[str, ...]
    platform: Literal["tpu", "gpu"] = "gpu"
    devices: int = 1
    """JAX devices per chip."""
    room: float
    """Bytes of memory that a program can use on one device: for a TPU the limit of its compiler (measured with
    libtpu 0.0.42), for a GPU the 75% that JAX preallocates by default."""
    price: float | None = None
    """US dollars per chip and hour; see PRICED."""
    product: float = 0.9
    """The fraction of `flops` that matrix products reach: 0.9 was assumed for TPUs, 0.6 for GPUs. Where the median of
    measured / predicted of half of a family's published steps was more than 10% from 1, it is fitted to that half
    (benchmarks/plan_vs_published.py)."""
    link_bandwidth: float
    """One-way bandwidth of the fast network in bytes/s: of one inter-chip link (ICI) of a TPU, or of all NVLink
    links of one GPU together."""
    network_bandwidth: float
    """One-way bandwidth per chip to other slices or hosts (DCN) in bytes/s, on the machine type in `cloud`."""
    aliases: tuple[str, ...] = ()
    dims: int = 0
    """Dimensions of a TPU's torus; 0 for GPUs."""
    units_per_chip: int = 1
    """Units per chip in a slice name: 2 where the name counts TensorCores, 1 where it counts chips."""
    max_chips: int = 16384
    """Chips in the largest slice that can be rented, which may be less than a pod; for GPUs, the largest number that
    `dtrain plan` accepts."""
    wraparound: int = 4
    """A side of the torus has wraparound links if its length is a multiple of this: see `closed`."""
    int8: float = 1.0
    """Rate of products of int8 over that of bfloat16. TPUs: cycles of one product of 4096 x 4096 x 4096, by the cost
    model of libtpu 0.0.42; GPUs: data sheets."""
    fp8: float = 1.0
    """The same of fp8 (e4m3)."""
    sparse_offload: bool = False
    """Whether XLA can run collectives on its SparseCores."""
    gpu: Gpu | None = None
    cloud: Cloud | None = None

    @property
    def rates(self) -> dict[str, float]:
        """Rates of products over those of bfloat16, by the formats of `precision.matmul`."""
        return {"int8": self.int8, "fp8": self.fp8}

    @property
    def flops_per_device(self) -> float:
        """Peak FLOP/s of one JAX device; a chip may appear as several devices."""
        return self.flops / self.devices

    def closed(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which sides of a slice have wraparound links. Slices of three dims have them if they consist of whole cubes.

        Source: docs.cloud.google.com/tpu/docs/v4, "3D mesh and 3D torus".
        """
        multiples = tuple(side % self.wraparound == 0 for side in shape)
        return multiples if len(shape) < 3 else (all(multiples),) * len(shape)

    @property
    def largest(self) -> str:
        """Name of the largest slice."""
        return f"{self.name}-{max(self.slices) * self.units_per_chip if self.dims else self.max_chips}"

    @cached_property
    def slices(self) -> dict[int, tuple[int, ...]]:
        """Torus shape of each available slice size, by number of chips."""
        if self.dims == 2:
            shapes = [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
            return {math.prod(shape): shape for shape in shapes}
        units = range(1, self.max_chips // 64 + 1)
        cubes = {64 * n: _near_cube(n) for n in units}
        small = [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
        return {math.prod(shape): shape for shape in small} | {n: shape for n, shape in cubes.items() if shape}


def _near_cube(units: int) -> tuple[int, ...] | None:
    """Most compact torus of so many 4 x 4 x 4 cubes; None if its longest side would exceed 7 cubes."""
    sides = [n for n in range(1, units + 1) if units % n == 0]
    shapes = [(a, b, units // (a * b)) for a, b in product(sides, sides) if units % (a * b) == 0]
    # smallest ratio of the longest to the shortest side; ties are broken by the sorted shape
    best = min((tuple(sorted(shape)) for shape in shapes), key=lambda s: (s[2] / s[0], s))
    return tuple(4 * side for side in best) if best[2] <= 7 else None


CHIPS = (
    # sources: docs.cloud.google.com/tpu/docs, one page per generation; link bandwidths: jax-ml/scaling-book, tpus.md
    Chip(
        name="v4", flops=275e12, hbm=32e9, room=30.75 * GIB, bandwidth=1200e9, kinds=("TPU v4",),
        platform="tpu", price=3.22,
        link_bandwidth=45e9, network_bandwidth=3.1e9, dims=3, units_per_chip=2, max_chips=4096,
        cloud=Cloud(label="tpu-v4-podslice", machine="ct4p-hightpu-4t",
                    accelerator="v4", runtime="tpu-ubuntu2204-base"),
    ),
    Chip(
        name="v5e", flops=197e12, hbm=16e9, room=15.75 * GIB, bandwidth=819e9, kinds=("TPU v5 lite", "TPU v5e"),
        platform="tpu", price=1.20,
        link_bandwidth=45e9, network_bandwidth=3.1e9, aliases=("v5litepod",), dims=2, max_chips=256, wraparound=16,
        int8=2.0, fp8=0.99,
        cloud=Cloud(label="tpu-v5-lite-podslice", machine="ct5lp-hightpu-4t",
                    accelerator="v5litepod", runtime="v2-alpha-tpuv5-lite"),
    ),
    Chip(
        name="v5p", flops=459e12, hbm=95e9, room=95.74 * GIB, bandwidth=2765e9, kinds=("TPU v5", "TPU v5p"),
        platform="tpu", sparse_offload=True, int8=1.98, fp8=0.99, price=4.20,
        link_bandwidth=90e9, network_bandwidth=6.25e9, dims=3, units_per_chip=2, max_chips=6144,
        cloud=Cloud(label="tpu-v5p-slice", machine="ct5p-hightpu-4t",
                    accelerator="v5p", runtime="v2-alpha-tpuv5"),
    ),
    Chip(
        name="v6e", flops=918e12, hbm=32e9, room=31.25 * GIB, bandwidth=1638e9, kinds=("TPU v6 lite", "TPU v6e"),
        platform="tpu", sparse_offload=True, product=0.60, int8=1.31, fp8=0.92, price=2.70,
        link_bandwidth=90e9, network_bandwidth=12.5e9, aliases=("trillium",), dims=2, max_chips=256, wraparound=16,
        cloud=Cloud(label="tpu-v6e-slice", machine="ct6e-standard-4t",
                    accelerator="v6e", runtime="v2-alpha-tpuv6e"),
    ),
    Chip(
        name="tpu7x", flops=2307e12, hbm=192e9, room=94.75 * GIB, bandwidth=7380e9, kinds=("TPU7x",),
        platform="tpu", sparse_offload=True, devices=2,
        product=0.69, int8=0.97, fp8=2.10, price=12.00, aliases=("ironwood", "v7x"),
        link_bandwidth=100e9, network_bandwidth=12.5e9, dims=3, units_per_chip=2, max_chips=9216,
        cloud=Cloud(label="tpu7x", machine="tpu7x-standard-4t"),
    ),
    # sources: vendor data sheets, dense figures, SXM boards; `far` is the network bandwidth of the machine type in
    # `cloud` divided by its eight GPUs: docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth
    Chip(
        name="a100-40g", flops=312e12, hbm=40e9, room=0.75 * 40e9, bandwidth=1555e9, kinds=("A100-SXM4-40GB",),
        product=0.6, price=3.67, gpu=AMPERE, int8=2.0,
        link_bandwidth=300e9, network_bandwidth=100e9 / 8 / 8,  # 100 Gbit/s a machine
        cloud=Cloud(label="nvidia-tesla-a100", machine="a2-highgpu-8g", sold=(1, 2, 4, 8),
                    sky="A100"),
    ),
    Chip(
        name="a100", flops=312e12, hbm=80e9, room=0.75 * 80e9, bandwidth=2039e9, kinds=("A100-SXM4-80GB",),
        product=0.6, price=5.07, gpu=AMPERE, int8=2.0,
        link_bandwidth=300e9, network_bandwidth=100e9 / 8 / 8, aliases=("a100-80g",),  # 100 Gbit/s a machine
        cloud=Cloud(label="nvidia-a100-80gb", machine="a2-ultragpu-8g", sold=(1, 2, 4, 8),
                    sky="A100-80GB"),
    ),
    Chip(
        name="h100", flops=989.4e12, hbm=80e9, room=0.75 * 80e9, bandwidth=3350e9, kinds=("H100 80GB HBM3",),
        product=0.6, price=11.06, gpu=HOPPER, int8=2.0, fp8=2.0,
        link_bandwidth=450e9, network_bandwidth=4 * 200e9 / 8 / 8,  # four cards of 200 Gbit/s for eight GPUs
        cloud=Cloud(label="nvidia-h100-80gb", machine="a3-highgpu-8g", sold=(1, 2, 4, 8),
                    sky="H100"),
    ),
    Chip(
        name="h200", flops=989.4e12, hbm=141e9, room=0.75 * 141e9, bandwidth=4800e9, kinds=("H200",),
        product=0.6, price=10.60, gpu=HOPPER, int8=2.0, fp8=2.0,
        link_bandwidth=450e9, network_bandwidth=8 * 400e9 / 8 / 8,  # a card of 400 Gbit/s for each GPU
        cloud=Cloud(label="nvidia-h200-141gb", machine="a3-ultragpu-8g", sold=(8,),
                    sky="H200"),
    ),
    Chip(
        name="b200", flops=2250e12, hbm=180e9, room=0.75 * 180e9, bandwidth=8000e9, kinds=("B200",),
        product=0.6, price=16.00, gpu=BLACKWELL, int8=2.0, fp8=2.0,
        link_bandwidth=900e9, network_bandwidth=8 * 400e9 / 8 / 8,  # a card of 400 Gbit/s for each GPU
        cloud=Cloud(label="nvidia-b200", machine="a4-highgpu-8g", sold=(8,),
                    sky="B200"),
    ),
)  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
    """The chip with that JAX `device_kind`; None if the table has no such chip."""
    name = device_kind.removeprefix("NVIDIA ")
    return next((chip for chip in CHIPS if name in chip.kinds), None)
