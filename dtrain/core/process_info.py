"""Rank, process count and coordinator of a process in a multi-process run, and the environment variables for them.

Every launcher sets the same variables: the supervisor and the agent on ssh hosts in Python, the templates of SLURM and
JobSet in shell. No JAX here, because `dtrain launch` and the recipe checks read them too.

    DTRAIN_RANK             0 to DTRAIN_WORLD_SIZE - 1; with --processes, the rank of the host
    DTRAIN_WORLD_SIZE       number of processes, or of hosts with --processes; 1 is a run of one process
    DTRAIN_COORDINATOR      host:port of rank 0, the address of the rendezvous
    DTRAIN_LAUNCH           id of a launch, the same for all of its starts on all of its hosts
    DTRAIN_REPLACES_HOSTS   1 if the engine replaces a lost host: the run then exits with code 75
    DTRAIN_METADATA         google or aws: the vendor whose metadata server is polled for preemption notices
    DTRAIN_RENDEZVOUS_S     seconds that processes wait for each other at the rendezvous; default 300
"""

import os
import re
from dataclasses import dataclass

from dtrain.core.errors import EnvironmentFault

RANK, WORLD_SIZE, COORDINATOR = "DTRAIN_RANK", "DTRAIN_WORLD_SIZE", "DTRAIN_COORDINATOR"
LAUNCH = "DTRAIN_LAUNCH"
REPLACES_HOSTS = "DTRAIN_REPLACES_HOSTS"
METADATA = "DTRAIN_METADATA"
RENDEZVOUS_S = "DTRAIN_RENDEZVOUS_S"

ADDRESS = re.compile(r"(?:[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
HINT = f"set all three, such as {RANK}=0 {WORLD_SIZE}=2 {COORDINATOR}=10.0.0.1:8476, or none of them"


@dataclass(frozen=True)
class ProcessInfo:
    """One process of a multi-process run, or one host if each host runs several processes."""

    rank: int
    world_size: int
    coordinator: str
    """host:port; an IPv6 address is in brackets."""

    def environment(self) -> dict[str, str]:
        """The environment variables for this process, as `process_info` reads them."""
        return {RANK: str(self.rank), WORLD_SIZE: str(self.world_size), COORDINATOR: self.coordinator}


def process_info() -> ProcessInfo | None:
    """Read this process's rank, process count and coordinator from the environment; None if it is the only process.

    EnvironmentFault if the variables are incomplete or invalid.
    """
    names = (RANK, WORLD_SIZE, COORDINATOR)
    values = {name: os.environ.get(name, "") for name in names}
    missing = [name for name in names if not values[name]]
    if len(missing) == len(names):
        return None
    if missing:
        present = next(name for name in names if values[name])
        verb = "are" if len(missing) > 1 else "is"
        raise EnvironmentFault(f"{present} is set, but {' and '.join(missing)} {verb} not set", HINT)
    for name in (RANK, WORLD_SIZE):
        if not (values[name].isascii() and values[name].isdecimal()):
            raise EnvironmentFault(f"{name}={values[name]} is not a whole number of at least 0", HINT)
    rank, world_size = int(values[RANK]), int(values[WORLD_SIZE])
    if rank >= world_size:
        raise EnvironmentFault(f"{RANK}={rank} is not less than {WORLD_SIZE}={world_size}", HINT)
    address = ADDRESS.fullmatch(values[COORDINATOR])
    if not address or not 0 < int(address[1]) < 2**16:
        raise EnvironmentFault(f"{COORDINATOR}={values[COORDINATOR]} is not host:port", HINT)
    return ProcessInfo(rank, world_size, values[COORDINATOR]) if world_size > 1 else None


def exports(rank: str, world_size: str, coordinator: str) -> str:
    """The shell line that exports the variables. Values are in double quotes, so that the shell that runs the line
    expands variables such as "$SLURM_PROCID" in them."""
    assert not any(quote in value for value in (rank, world_size, coordinator) for quote in "\"'`\n"), "quote in value"
    values = {RANK: rank, WORLD_SIZE: world_size, COORDINATOR: coordinator}
    return "export " + " ".join(f'{name}="{value}"' for name, value in values.items())


def launch_id() -> str:
    """The id of the launch that this process belongs to; empty if it was not started by `dtrain launch`."""
    return os.environ.get(LAUNCH, "")


def replaces_hosts() -> bool:
    """Whether the engine replaces a lost host. EnvironmentFault if the variable is neither 0 nor 1."""
    value = os.environ.get(REPLACES_HOSTS) or "0"
    if value not in ("0", "1"):
        raise EnvironmentFault(f"{REPLACES_HOSTS}={value} is neither 0 nor 1")
    return value == "1"


def rendezvous_seconds(default: float) -> float:
    """Seconds that processes wait for each other. EnvironmentFault unless the variable is above 0 and below a day."""
    text = os.environ.get(RENDEZVOUS_S) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86400:
        raise EnvironmentFault(f"{RENDEZVOUS_S}={text} is not a number of seconds above 0 and below 86400 (one day)")
    return seconds
