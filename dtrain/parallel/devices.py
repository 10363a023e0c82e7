"""Which devices there are: pretended ones, and those of processes that run together."""

import importlib.metadata
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from glob import glob
from typing import Any

from dtrain import faults
from dtrain.errors import EnvironmentFault
from dtrain.parallel.meeting import LOOPBACK, meet

PROCESS = "DTRAIN_PROCESS"
"""`rank/processes@host:port`: set for a process that runs together with others."""

SILENCE, LOCAL_SILENCE = 10, 100
"""Seconds after which a machine that is not heard of counts as gone; on this one, its parent knows sooner."""

FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"


@dataclass(frozen=True)
class Seat:
    """This process's place among those that run together."""

    rank: int
    processes: int
    coordinator: str

    def __str__(self) -> str:
        return f"{self.rank}/{self.processes}@{self.coordinator}"


def seat() -> Seat | None:
    """This process's place, or None where it runs alone. EnvironmentFault where it is told wrongly."""
    text = os.environ.get(PROCESS)
    if not text:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)@(\S+:\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise EnvironmentFault(f"{PROCESS}={text} is not rank/processes@host:port", f"as {PROCESS}=0/2@10.0.0.1:8476")
    return Seat(int(found[1]), int(found[2]), found[3])


def settle() -> None:
    """Say to JAX, before it is imported, what it should not find out by trying."""
    _keep_to_sound_fusions()
    _pass_over_an_absent_tpu()


def _pass_over_an_absent_tpu() -> None:
    """libtpu, installed to compile for TPUs, complains at length where none is plugged in."""
    installed = lambda name: importlib.util.find_spec(name) is not None  # noqa: E731
    if "JAX_PLATFORMS" in os.environ or not installed("libtpu") or any(map(glob, ("/dev/accel*", "/dev/vfio/*"))):
        return
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if installed("jax_cuda13_plugin") else "cpu"


def _keep_to_sound_fusions() -> None:
    """Keep XLA's CPU compiler from fusions that are known to give wrong numbers.

    jaxlib 0.10.2 to 0.11 compile some products followed by a sum to silently wrong results or a crash
    (github.com/jax-ml/jax, issues 39103, 39257, 40412).
    """
    version = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:3] if part.isdigit())
    flags = os.environ.get("XLA_FLAGS", "")
    if (0, 10, 2) <= version < (0, 12) and FUSIONS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FUSIONS}=".strip()


def pretend(devices: int) -> None:
    """Make the CPU show that many devices to this process; must come before JAX is imported.

    Thread pools are sized from PJRT_NPROC; too small a pool deadlocks in collectives.
    """
    assert "jax" not in sys.modules, "devices are pretended before JAX is imported"
    settle()
    os.environ["PJRT_NPROC"] = str(max(32, 4 * devices))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)


def found() -> list[Any]:
    """JAX's devices; EnvironmentFault where the platform that was asked for has none."""
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        hint = f"JAX_PLATFORMS={asked} is set; unset it, or install that platform" if asked else "run `dtrain doctor`"
        reason = str(error).splitlines()[0] if str(error) else f"no {asked} device answers"
        raise EnvironmentFault(f"no device can be used: {reason}", hint) from error


def join(place: Seat) -> None:
    """Meet the other processes; EnvironmentFault names the address where they do not come."""
    import jax

    faults.strike("join", place.rank)
    meet(place.rank, place.processes, place.coordinator)
    local = place.coordinator.startswith(LOOPBACK)
    inside = LOOPBACK if local else "[::]" if place.coordinator.startswith("[") else "0.0.0.0"
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.rank,
            coordinator_bind_address=f"{inside}:{place.coordinator.rpartition(':')[2]}" if place.rank == 0 else None,
            heartbeat_timeout_seconds=LOCAL_SILENCE if local else SILENCE,
        )
    except RuntimeError as error:
        message = f"process {place.rank} of {place.processes} could not meet the others at {place.coordinator}"
        raise EnvironmentFault(f"{message}: {error}") from error
