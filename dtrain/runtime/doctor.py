"""Examine a machine: versions, devices and their speed, memory, disk, tools, and what fixes what is wrong."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dtrain.core import extras
from dtrain.core.chips import chip_of
from dtrain.core.errors import EnvironmentFault
from dtrain.core.types import Device
from dtrain.parallel.devices import available_devices
from dtrain.track.wandb import has_key
from dtrain.train.record import versions

ROOM = 5 * 2**30
"""Bytes of free disk below which a warning is given."""
SLOW_DISK = 50e6
"""Bytes per second of synced writes below which a warning is given."""
SAMPLE = 32 << 20
"""Bytes that are written and read to time the disk."""
HALF = 0.5
"""The part of the chip's peak that a large product of matrices should reach."""
TESTED = {
    "python": ("3.11", "3.12"), "jax": ("0.10.2", "0.12.0.1"), "jaxlib": ("0.10.2", "0.12.0.1"),
    "numpy": ("2.4.6", "2.5.5"), "optax": ("0.2.8", "0.2.8"), "orbax-checkpoint": ("0.12.8", "0.12.8"),
    "grain": ("0.2.18", "0.2.18"), "libtpu": ("0.0.42.1", "0.0.50.1"),
}  # fmt: skip
"""The oldest and the newest version with which dtrain's tests are run."""
TOOLS = {
    "ssh": (["ssh", "-V"], "launch: ssh", "apt-get install openssh-client"),
    "terraform": (["terraform", "-version"], "the modules in terraform/", "https://developer.hashicorp.com/terraform"),
    "gcloud": (["gcloud", "--version"], "TPUs and GKE", "https://cloud.google.com/sdk"),
    "kubectl": (["kubectl", "version", "--client"], "launch: gke", "gcloud components install kubectl"),
    "sky": (["sky", "--version"], "launch: sky", 'uv tool install "skypilot[gcp]==0.14.1"'),
    "sbatch": (["sbatch", "--version"], "launch: slurm, on a login node", "use a login node of the cluster"),
}
"""Programs for `dtrain launch`: the command that prints the version, what needs them, how to get them."""


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    what: str
    found: str
    verdict: Literal["ok", "warning", "missing", "optional"] = "ok"
    """optional: not there, and needed only for what `found` names."""
    fix: str = ""

    def text(self, width: int) -> str:
        """One line, and a second one if something should be fixed."""
        line = f"{self.verdict:<10}{self.what:<{width}}{self.found}"
        return f"{line}\n{'':10}{'':{width}}fix: {self.fix}" if self.fix else line


def text(checks: Sequence[Check]) -> str:
    """All checks as lines in columns."""
    width = max(len(check.what) for check in checks) + 2
    return "\n".join(check.text(width) for check in checks)


def examine(folder: Path) -> list[Check]:
    """Check everything that a run in this folder depends on. Initialises JAX's devices.

    EnvironmentFault if the folder cannot be written.
    """
    try:
        devices = available_devices()
    except EnvironmentFault as error:
        checks = [Check("devices", error.message, "missing", "JAX_PLATFORMS=cpu dtrain doctor")]
    else:
        checks = [_devices(devices), *_speeds(devices), *_accelerators(devices[0].platform)]
    return [*_versions(), *checks, *_drivers(), _memory(), _disk(folder), _disk_speed(folder), *_clock(), *_tools()]


def _versions() -> Iterator[Check]:
    found = dict(versions())
    with suppress(importlib.metadata.PackageNotFoundError):
        found["libtpu"] = importlib.metadata.version("libtpu")
    for name, version in found.items():
        if version == "not installed":
            yield Check(name, version, "missing", f"pip install {name}")
            continue
        oldest, newest = TESTED.get(name, (version, version))
        if (
            version_numbers(oldest)
            <= version_numbers(version)[: len(version_numbers(newest))]
            <= version_numbers(newest)
        ):
            yield Check(name, version)
        else:
            tested = oldest if oldest == newest else f"{oldest} to {newest}"
            fix = f"pip install '{name}=={newest}'" if name != "python" else f"use Python {newest}"
            yield Check(name, f"{version}, tested with {tested}", "warning", fix)
    for name in extras.missing(extras.PACKAGES):
        yield Check(name, f"missing: it {extras.use_of(name)}", "optional", extras.command([name]))
    for name in extras.missing(["libtpu"]):
        yield Check(name, "missing: dtrain plan compiles for TPUs with it", "optional", "pip install 'dtrain[tpu]'")


def version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _devices(devices: list[Device]) -> Check:
    import jax
    import jax.numpy as jnp

    start = time.perf_counter()
    assert float(jax.jit(jnp.sum)(jnp.ones(8))) == 8
    kinds = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    return Check("devices", f"{kinds}, first program ran in {time.perf_counter() - start:.1f} s")


def _speeds(devices: list[Device]) -> Iterator[Check]:
    """A product of matrices on one device, and a sum over all of them."""
    import jax
    import jax.numpy as jnp

    from dtrain.runtime.speed import matrix_rate, shortest

    chip, (rate, kind) = chip_of(devices[0].device_kind), matrix_rate(devices[0])
    peak = chip.flops_per_device if chip else None
    share = f", {rate / peak:.0%} of the chip's peak" if peak else ""
    slow = peak is not None and rate < HALF * peak
    fix = "look for another program on the device, a low power limit, or thermal throttling" if slow else ""
    yield Check("matrix product", f"{rate / 1e12:.2f} TFLOP/s, {kind}{share}", "warning" if slow else "ok", fix)
    if len(devices) > 1:
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(devices, ("all",))  # pyright: ignore[reportArgumentType]
        count = len(devices) * (1 << 20)
        values = jax.device_put(jnp.ones((count,), jnp.float32), NamedSharding(mesh, PartitionSpec("all")))
        split, whole = PartitionSpec("all"), PartitionSpec()
        add = jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=split, out_specs=whole)
        total = jax.jit(add)
        assert float(total(values)[0]) == len(devices)
        seconds = shortest(total, values)
        yield Check("all-reduce", f"4 MiB over {len(devices)} devices in {1e3 * seconds:.2f} ms")


def _accelerators(platform: str) -> Iterator[Check]:
    """Warnings for accelerators that the machine has but JAX does not use."""
    if platform == "cpu" and Path("/dev/nvidia0").exists():
        yield Check("gpu", "present, but JAX does not use it", "warning", 'pip install "dtrain[cuda]"')
    if platform == "cpu" and (Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()):
        yield Check("tpu", "present, but JAX does not use it", "warning", 'pip install "dtrain[tpu]"')


def _drivers() -> Iterator[Check]:
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,name,clocks.sm,clocks.max.sm", "--format=csv,noheader"]
        lines = _output(query).splitlines()
        yield Check("nvidia driver", lines[0]) if lines else Check("nvidia driver", "nvidia-smi failed", "warning")


def _memory() -> Check:
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Check("memory", f"{pages * page / 2**30:.1f} GiB, {os.cpu_count()} cores")


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    found = f"{free / 2**30:.1f} GiB free in {folder.resolve()}"
    fix = "free disk space, or use another disk: --runs-dir"
    return Check("disk", found, "warning", fix) if free < ROOM else Check("disk", found)


def _disk_speed(folder: Path) -> Check:
    """The speed of a synced write, as for a checkpoint, and of a read. The folder may be a bucket that is mounted."""
    path, block = folder / f".dtrain-doctor-{os.getpid()}", os.urandom(1 << 20)
    try:
        start = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(SAMPLE >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        written = SAMPLE / (time.perf_counter() - start)
        start = time.perf_counter()
        path.read_bytes()
        read = SAMPLE / (time.perf_counter() - start)
    except OSError as error:
        raise EnvironmentFault(f"cannot write to {folder}: {error.strerror}", "another folder: --folder") from error
    finally:
        path.unlink(missing_ok=True)
    found = f"{written / 1e6:,.0f} MB/s written and synced, {read / 1e6:,.0f} MB/s read (cached)"
    fix = "checkpoints will take long: use a local disk, or checkpoint.minutes: 30"
    return Check("disk speed", found, "warning", fix) if written < SLOW_DISK else Check("disk speed", found)


def _clock() -> Iterator[Check]:
    """Whether the clock is synchronised, if the system says so: leases and logs of several machines compare times."""
    if shutil.which("timedatectl"):
        found = _output(["timedatectl", "show", "--property=NTPSynchronized", "--value"]).strip()
        if found in ("yes", "no"):
            fix = "" if found == "yes" else "timedatectl set-ntp true"
            verdict = "ok" if found == "yes" else "warning"
            yield Check("clock", "synchronised" if found == "yes" else "not synchronised", verdict, fix)


def _tools() -> Iterator[Check]:
    yield (
        Check("W&B login", "an API key is set")
        if has_key()
        else Check("W&B login", "needed for track.to: [wandb], online", "optional", "wandb login")
    )
    for name, (command, use, fix) in TOOLS.items():
        if shutil.which(name):
            yield Check(name, (_output(command).strip().splitlines() or ["found"])[0][:80])
        else:
            yield Check(name, f"needed for {use}", "optional", fix)


def _output(command: list[str]) -> str:
    """What a program prints; empty if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return (done.stdout or done.stderr) if done.returncode == 0 else ""
    return ""
