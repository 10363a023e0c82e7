"""Devices of a TPU slice or of GPUs, which need not be present."""

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.core.chips import PER_HOST, Chip
from dtrain.core.errors import EnvironmentFault
from dtrain.core.slices import Target
from dtrain.core.types import Device

CUDNN = 90800
"""Version of cuDNN that programs are traced for, 9.8.0; with a GPU, JAX would query the installed one."""


def described(chip: Chip, count: int) -> list[object]:
    """Device descriptions of `count` GPUs, eight per host. Raises EnvironmentFault if the plug-in is not installed."""
    if not any(importlib.util.find_spec(plugin) for plugin in ("jax_cuda13_plugin", "jax_cuda12_plugin")):
        raise EnvironmentFault(
            "JAX's CUDA plug-in, which compiles for GPUs, is not installed",
            "pip install 'dtrain[cuda]', or add --quick, which compiles nothing",
        )
    from jax.experimental import topologies

    hosts = -(-count // PER_HOST)
    grid = f"1x{hosts}x{count // hosts}"
    return list(topologies.get_topology_desc("dtrain", "cuda", topology=grid, target_config=_config(chip)).devices)


def _config(chip: Chip) -> str:
    """The chip as XLA's GpuTargetConfigProto, in text format."""
    gpu = chip.gpu
    assert gpu is not None, f"{chip.name} is not a GPU"
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {gpu.capability} }}
          core_count: {gpu.multiprocessors}
          fpus_per_core: {gpu.fpus}
          clock_rate_ghz: {gpu.clock / 1e9}
          memory_bandwidth: {int(chip.bandwidth)}
          device_memory_size: {int(chip.hbm)}
          l2_cache_size: {gpu.l2}
          shared_memory_per_core: {gpu.shared}
          shared_memory_per_block_optin: {gpu.shared - 1024}
          shared_memory_per_block: 49152
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          threads_per_core_limit: 2048
          threads_per_block_limit: 1024
          threads_per_warp: 32
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: {CUDNN // 10000} minor: {CUDNN // 100 % 100} }}
        device_description_str: "NVIDIA {chip.kinds[0]}"
    """


def assume_cudnn(chip: Chip) -> None:
    """Make this process trace and lower cuDNN attention without a GPU: JAX's version checks return fixed values."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    capability = chip.gpu.capability if chip.gpu else 0
    attention.check_cudnn_version = lambda: CUDNN
    attention.check_compute_capability = lambda wanted: capability >= float(wanted)


@dataclass(frozen=True)
class StandIn:
    """The attributes that a mesh reads of a device, for devices that no installed library describes."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]
    process_index: int
    slice_index: int
    core_on_chip: int = 0


def stand_ins(on: Target) -> list[object]:
    """Stand-in devices to trace a step for; nothing can be compiled for them."""
    kind, shape = on.chip.kinds[0] if on.chip else "cpu", on.shape or (on.chips,)
    places = [place + (0,) * (3 - len(place)) for place in np.ndindex(*shape)]
    cores, chips = range(on.chip.devices if on.chip else 1), on.chips // on.slices
    found = [(cut, place, core) for cut in range(on.slices) for place in places for core in cores]
    return [
        StandIn(
            i,
            on.platform,
            kind,
            coords=place if on.shape else (i, 0, 0),
            process_index=i // PER_HOST,
            slice_index=cut,
            core_on_chip=core,
        )
        for i, (cut, place, core) in enumerate(found[: chips * on.slices * len(cores)])
    ]


QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
"""Environment variables of libtpu: share the machine with other processes, look for no TPU, log no warnings."""


def devices(on: Target) -> list[Device]:
    """The target's devices as its compiler describes them. Raises EnvironmentFault if it is not installed."""
    import jax

    if on.chip is None:
        result = jax.devices("cpu")
        assert len(result) == on.devices, "CPU devices must be simulated before JAX starts"
        return list(result)
    if on.chip.platform == "gpu":
        return described(on.chip, on.devices)
    if importlib.util.find_spec("libtpu") is None:
        raise EnvironmentFault(
            "libtpu, which compiles for TPUs, is not installed",
            "pip install 'dtrain[tpu]', or add --quick, which compiles nothing",
        )
    os.environ.update(QUIET)
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": on.slices} if on.slices > 1 else {}
    options |= {"chips_per_host_bounds": (1, 1, 1)} if math.prod(on.shape) == 1 else {}
    options |= {"chip_config_name": "megacore"} if on.chip.name == "v4" else {}
    closed = on.chip.closed(on.shape)
    options["wrap"] = (*closed, *[False] * (3 - len(closed)))  # else libtpu compiles for a mesh without these links
    shape = "x".join(map(str, on.shape))
    result = topologies.get_topology_desc(platform="tpu", topology_name=f"{on.chip.name}:{shape}", **options).devices
    assert len(result) == on.devices, f"{on}: libtpu describes {len(result)} devices"
    return list(result)


def places(mesh_devices: Sequence[Device], on: Target) -> tuple[np.ndarray, np.ndarray]:
    """Torus coordinates of each device, and the number of its slice or, for GPUs, of its host."""
    coords = np.array([getattr(device, "coords", (device.id, 0, 0)) for device in mesh_devices])
    if on.platform == "gpu":
        return coords, np.array([device.id // PER_HOST for device in mesh_devices])
    return coords, np.array([getattr(device, "slice_index", 0) or 0 for device in mesh_devices])
