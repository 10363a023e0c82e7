"""Number of devices of this machine, as far as it is known without starting JAX's backends."""

import importlib.util
import os
import re
from glob import glob

from dtrain.core.process_info import process_info

FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def devices_here() -> int | None:
    """Number of devices that a run would have; None if only JAX could find out."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    accelerators = any(map(glob, ("/dev/accel*", "/dev/vfio/*", "/dev/nvidia[0-9]*", "/dev/kfd")))
    plugin = any(map(_installed, ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin")))
    if process_info() or (platforms != "cpu" and accelerators and plugin):
        return None
    if platforms and "cpu" not in platforms.split(","):
        return None
    forced = FORCED.search(os.environ.get("XLA_FLAGS", ""))
    simulated = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return int(simulated) if simulated.isdecimal() else int(forced[1]) if forced else 1


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
