"""Which devices there are: pretended ones, and those of processes that run together."""

import importlib.metadata
import importlib.util
import os
import sys
from glob import glob
from typing import Any

from dtrain.core import fault_injection, signals
from dtrain.core.errors import EnvironmentFault, HostLost
from dtrain.core.process_info import ProcessInfo, replaces_hosts
from dtrain.parallel.rendezvous import LOOPBACK, Missing, Refusal, meet

SILENCE, LOCAL_SILENCE = 10, 100
"""Seconds after which a machine that is not heard of counts as gone; on this one, its parent knows sooner."""

COMPILING = 2 * 3600 * 1000
"""Milliseconds by which compiling may take longer in one process than in another."""
FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"


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


def are_pretended(devices: list[Any]) -> bool:
    """Whether the CPU shows several devices to this process."""
    import jax

    return devices[0].platform == "cpu" and jax.local_device_count() > 1


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


def join(info: ProcessInfo, *, local: int = 1, refusal: Refusal = lambda: None) -> None:
    """Meet the other processes, of which each host has `local`; EnvironmentFault names the address where they do not
    come, HostLost the host where the engine replaces it. Raises the `refusal` of the first process."""
    import jax

    fault_injection.strike("join", info.rank)
    replaced = replaces_hosts() and info.world_size > local
    try:
        meet(info.rank, info.world_size, info.coordinator, refusal)
    except Missing as missing:
        hosts = sorted({rank // local for rank in missing.ranks} - {info.rank // local})
        if not (replaced and hosts):
            raise
        which = f"host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))} of {info.world_size // local}"
        raise HostLost(f"{which} lost: {missing.message}", "the engine replaces it and starts the run again") from None
    on_this_host = info.coordinator.startswith(LOOPBACK)
    inside = LOOPBACK if on_this_host else "[::]" if info.coordinator.startswith("[") else "0.0.0.0"
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            info.coordinator,
            info.world_size,
            info.rank,
            coordinator_bind_address=f"{inside}:{info.coordinator.rpartition(':')[2]}" if info.rank == 0 else None,
            heartbeat_timeout_seconds=LOCAL_SILENCE if on_this_host else SILENCE,
        )
    except RuntimeError as error:
        message = f"process {info.rank} of {info.world_size} could not meet the others at {info.coordinator}: {error}"
        raise (HostLost if replaced else EnvironmentFault)(message) from error


def await_compiled() -> None:
    """Wait until all processes have compiled: one that read its programs from the cache would be minutes early at the
    first sum over all, where Gloo waits 30 s. A process that dies meanwhile ends the others, as later."""
    import jax

    if jax.process_count() > 1:
        from jax._src import distributed  # orbax uses the same service; JAX has no public name for it

        client = distributed.global_state.client
        assert client is not None
        client.wait_at_barrier("dtrain compiled", COMPILING)


def part() -> None:
    """Wait until the other processes are done too: the end of the first one would end theirs."""
    import jax

    if jax.process_count() > 1:
        jax.distributed.shutdown()
        signals.renew()  # JAX takes its own handler of SIGTERM away, and none is left
