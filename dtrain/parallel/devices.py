"""JAX's devices: fake ones on the CPU, and joining the processes of a distributed run."""

import importlib.metadata
import importlib.util
import os
import sys
from glob import glob

from dtrain.core import fault_injection, signals
from dtrain.core.errors import EnvironmentFault, HostLost
from dtrain.core.process_info import ProcessInfo, replaces_hosts
from dtrain.core.types import Device
from dtrain.parallel.rendezvous import LOOPBACK, Missing, Refusal, await_listener, interface, wait_for_all

SILENCE, LOCAL_SILENCE = 10, 100
"""Heartbeat timeouts in seconds, of processes on other hosts and on this one, where the supervisor notices sooner."""

COMPILING = 2 * 3600 * 1000
"""Milliseconds that a process waits for the others to finish compiling."""
TLS = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")
"""JAX's variables for mutual TLS between processes: certificate, its private key, certificate of the authority."""
FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"


def configure_environment() -> None:
    """Set the environment variables that JAX needs; call it before JAX is imported."""
    _avoid_wrong_fusions()
    _ignore_absent_tpu()


def _ignore_absent_tpu() -> None:
    """Without a TPU, select other platforms: libtpu, installed to compile for TPUs, would log errors."""

    def installed(name: str) -> bool:
        return importlib.util.find_spec(name) is not None

    if "JAX_PLATFORMS" in os.environ or not installed("libtpu") or any(map(glob, ("/dev/accel*", "/dev/vfio/*"))):
        return
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if installed("jax_cuda13_plugin") else "cpu"


def _avoid_wrong_fusions() -> None:
    """Turn off fusions of XLA's CPU compiler that give wrong numbers.

    jaxlib 0.10.2 to 0.11 compile some products followed by a sum into wrong results, without an error, or into a crash
    (github.com/jax-ml/jax, issues 39103, 39257, 40412).
    """
    version = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:3] if part.isdigit())
    if (0, 10, 2) <= version < (0, 12):
        _add_flag(FUSIONS, "")


def _add_flag(name: str, value: str) -> None:
    """Give XLA the flag, unless the user has set it."""
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}={value}".strip()


def fake_devices(devices: int) -> None:
    """Give this process that many fake CPU devices; call it before JAX looks for its devices.

    Thread pools are sized from PJRT_NPROC; too small a pool deadlocks in collectives.
    """
    configure_environment()
    os.environ["PJRT_NPROC"] = str(max(32, 4 * devices))
    settings: dict[str, str | int] = {"jax_platforms": "cpu", "jax_num_cpu_devices": devices}
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        if "jax" in sys.modules:  # it has read the environment; RuntimeError if it has devices
            sys.modules["jax"].config.update(name, value)


def are_fake(devices: list[Device]) -> bool:
    """Whether the devices are fake: several on the CPU of this process."""
    import jax

    return devices[0].platform == "cpu" and jax.local_device_count() > 1


def available_devices() -> list[Device]:
    """JAX's devices; raises EnvironmentFault if the requested platform has none."""
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        platform = os.environ.get("JAX_PLATFORMS", "")
        hint = (
            f"JAX_PLATFORMS={platform} is set; unset it, or install that platform"
            if platform
            else "run `dtrain doctor`"
        )
        reason = str(error).splitlines()[0] if str(error) else f"no {platform} device responds"
        raise EnvironmentFault(f"no device can be used: {reason}", hint) from error


def join(info: ProcessInfo, *, local: int = 1, refusal: Refusal = lambda: None) -> None:
    """Join the other processes, `local` on each host: first the rendezvous, then `jax.distributed`.

    Raises Missing with the ranks that did not arrive, or HostLost with their hosts if the launcher replaces hosts;
    EnvironmentFault if the address cannot be used; and the `refusal` of rank 0 in every process.
    """
    import jax

    fault_injection.strike("join", info.rank)
    _refuse_ignored_tls()
    replaced = replaces_hosts() and info.world_size > local
    try:
        wait_for_all(info.rank, info.world_size, info.coordinator, refusal)
    except Missing as missing:
        hosts = sorted({rank // local for rank in missing.ranks} - {info.rank // local})
        if not (replaced and hosts):
            raise
        which = f"host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))} of {info.world_size // local}"
        raise HostLost(f"{which} lost: {missing.message}", "the launcher replaces it and restarts the run") from None
    host, _, port = info.coordinator.rpartition(":")
    on_this_host = host == LOOPBACK
    listened = interface(host.strip("[]")) or ("::" if ":" in host else "0.0.0.0")
    bound = f"[{listened}]:{port}" if ":" in listened else f"{listened}:{port}"
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if info.rank:
        await_listener((host.strip("[]"), int(port)))
    try:
        jax.distributed.initialize(
            info.coordinator,
            info.world_size,
            info.rank,
            coordinator_bind_address=bound if info.rank == 0 else None,
            heartbeat_timeout_seconds=LOCAL_SILENCE if on_this_host else SILENCE,
        )
    except RuntimeError as error:
        message = f"process {info.rank} of {info.world_size} could not join the others at {info.coordinator}: {error}"
        raise (HostLost if replaced else EnvironmentFault)(message) from error


def _refuse_ignored_tls() -> None:
    """EnvironmentFault if mutual TLS is asked for and this JAX would ignore that."""
    import jax

    asked = [name for name in TLS if os.environ.get(name)]
    if asked and not hasattr(jax.config, TLS[0].lower()):
        message = f"{asked[0]} is set, and JAX {jax.__version__} has no TLS between processes"
        raise EnvironmentFault(message, f"use JAX 0.12 or newer, or unset {asked[0]}")
    if asked and (unset := [name for name in TLS if name not in asked]):
        raise EnvironmentFault(f"{asked[0]} is set, but {' and '.join(unset)} not", "set all three of them, or none")


def await_compiled() -> None:
    """Wait until all processes have compiled.

    A process that read its programs from the cache would reach the first collective minutes before the others, and
    Gloo waits 30 s there. If a process dies meanwhile, the others exit, as they do later.
    """
    import jax

    if jax.process_count() > 1:
        from jax._src import distributed  # JAX has no public name for it; orbax uses it, too

        client = distributed.global_state.client
        assert client is not None
        client.wait_at_barrier("dtrain compiled", COMPILING)


def disconnect() -> None:
    """Leave the distributed run once all processes are done: if the coordinator exits first, the others fail."""
    import jax

    if jax.process_count() > 1:
        jax.distributed.shutdown()
        signals.renew()  # JAX's shutdown removes the SIGTERM handler: install it again
