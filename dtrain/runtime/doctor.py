"""Examine a machine: devices, packages, memory and disk, and what is missing."""

import importlib.util
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dtrain.core.errors import EnvironmentFault
from dtrain.core.types import Device
from dtrain.parallel.devices import available_devices
from dtrain.train.record import versions

ROOM = 5 * 2**30
"""Bytes of free disk below which a warning is given."""
OPTIONAL = {
    "tensorboardX": ("track.to: [tensorboard]", "pip install tensorboardX"),
    "wandb": ("track.to: [wandb]", "pip install wandb"),
    "libtpu": ("dtrain plan for TPUs", 'pip install "jax[tpu]"'),
    "PIL": ("data.kind: images", "pip install pillow"),
}


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    what: str
    found: str
    verdict: Literal["ok", "warning", "missing"] = "ok"
    fix: str = ""

    def text(self) -> str:
        """One line, and a second one if something should be fixed."""
        line = f"{self.verdict:<8}{self.what:<17}{self.found}"
        return f"{line}\n{'':8}{'':17}fix: {self.fix}" if self.fix else line


def examine() -> list[Check]:
    """Check everything that a run depends on. Initialises JAX's devices."""
    try:
        devices = available_devices()
    except EnvironmentFault as error:
        checks = [Check("devices", error.message, "missing", "JAX_PLATFORMS=cpu dtrain doctor")]
    else:
        checks = [_devices(devices), *_accelerators(devices[0].platform)]
    return [*_versions(), *checks, _memory(), _disk(), *_packages()]


def _versions() -> list[Check]:
    return [
        Check(name, version, "missing", f"pip install {name}") if version == "not installed" else Check(name, version)
        for name, version in versions().items()
    ]


def _devices(devices: list[Device]) -> Check:
    import jax
    import jax.numpy as jnp

    start = time.perf_counter()
    assert float(jax.jit(jnp.sum)(jnp.ones(8))) == 8
    kinds = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    return Check("devices", f"{kinds}, first program ran in {time.perf_counter() - start:.1f} s")


def _memory() -> Check:
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Check("memory", f"{pages * page / 2**30:.1f} GiB, {os.cpu_count()} cores")


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / 2**30:.1f} GiB free in {Path.cwd()}"
    fix = "free disk space, or use another disk: --runs-dir"
    return Check("disk", text, "warning", fix) if free < ROOM else Check("disk", text)


def _packages() -> list[Check]:
    return [
        Check(name, f"needed for {use}", "warning", fix)
        for name, (use, fix) in OPTIONAL.items()
        if importlib.util.find_spec(name) is None
    ]


def _accelerators(platform: str) -> list[Check]:
    """Warnings for accelerators that the machine has but JAX does not use."""
    checks = []
    if platform == "cpu" and Path("/dev/nvidia0").exists():
        checks.append(Check("gpu", "present, but JAX does not use it", "warning", 'pip install "dtrain[cuda]"'))
    if platform == "cpu" and (Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()):
        checks.append(Check("tpu", "present, but JAX does not use it", "warning", 'pip install "dtrain[tpu]"'))
    return checks
