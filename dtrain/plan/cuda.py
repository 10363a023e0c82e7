"""Describe GPUs that are not present, by JAX's CUDA plug-in, so that programs can be compiled for them."""

import importlib.util

from dtrain.core.chips import PER_HOST, Chip
from dtrain.core.errors import EnvironmentFault

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
