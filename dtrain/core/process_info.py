"""Rank, process count and coordinator of a process that runs together with others, and the variables that carry them.

Every launcher sets the same variables: the supervisor and the agent on ssh hosts in Python, the templates of SLURM and
JobSet in shell. No JAX here: `dtrain launch` and the recipe's checks read them too.

    DTRAIN_RANK             0 to DTRAIN_WORLD_SIZE - 1; without --processes, the rank of the host
    DTRAIN_WORLD_SIZE       how many there are; 1 is a run of one process
    DTRAIN_COORDINATOR      host:port of rank 0, where all meet
    DTRAIN_LAUNCH           the id of a launch, the same for all of its starts on all of its hosts
    DTRAIN_REPLACES_HOSTS   1 where the engine replaces a host that is lost: the run then leaves with 75
    DTRAIN_METADATA         google or aws: whose metadata server is asked for notices of preemption
    DTRAIN_RENDEZVOUS_S     seconds that processes wait for each other; 300 where it is not set
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
HINT = f"as {RANK}=0 {WORLD_SIZE}=2 {COORDINATOR}=10.0.0.1:8476, or none of the three"


@dataclass(frozen=True)
class ProcessInfo:
    """One process among those that run together, or one host where each host runs several."""

    rank: int
    world_size: int
    coordinator: str
    """host:port, an IPv6 address in brackets."""

    def environment(self) -> dict[str, str]:
        """The variables from which `process_info` reads it back."""
        return {RANK: str(self.rank), WORLD_SIZE: str(self.world_size), COORDINATOR: self.coordinator}


def process_info() -> ProcessInfo | None:
    """What the environment says of this process; None where it runs alone. EnvironmentFault where the variables are
    incomplete or impossible."""
    names = (RANK, WORLD_SIZE, COORDINATOR)
    values = {name: os.environ.get(name, "") for name in names}
    missing = [name for name in names if not values[name]]
    if len(missing) == len(names):
        return None
    if missing:
        given = next(name for name in names if values[name])
        raise EnvironmentFault(f"{given} is set, {' and '.join(missing)} not", HINT)
    for name in (RANK, WORLD_SIZE):
        if not (values[name].isascii() and values[name].isdecimal()):
            raise EnvironmentFault(f"{name}={values[name]} is no whole number", HINT)
    rank, world_size = int(values[RANK]), int(values[WORLD_SIZE])
    if rank >= world_size:
        raise EnvironmentFault(f"{RANK}={rank} is not below {WORLD_SIZE}={world_size}", HINT)
    address = ADDRESS.fullmatch(values[COORDINATOR])
    if not address or not 0 < int(address[1]) < 2**16:
        raise EnvironmentFault(f"{COORDINATOR}={values[COORDINATOR]} is not host:port", HINT)
    return ProcessInfo(rank, world_size, values[COORDINATOR]) if world_size > 1 else None


def exports(rank: str, world_size: str, coordinator: str) -> str:
    """The shell line that sets the variables. Each value is put in double quotes, so that "$SLURM_PROCID" is expanded
    by the shell that runs the line."""
    assert not any(quote in value for value in (rank, world_size, coordinator) for quote in "\"'`\n"), "plain words"
    values = {RANK: rank, WORLD_SIZE: world_size, COORDINATOR: coordinator}
    return "export " + " ".join(f'{name}="{value}"' for name, value in values.items())


def launch_id() -> str:
    """The id of the launch that this start belongs to; empty where a person typed the command."""
    return os.environ.get(LAUNCH, "")


def replaces_hosts() -> bool:
    """Whether the engine replaces a host that is lost. EnvironmentFault where the variable is neither 0 nor 1."""
    value = os.environ.get(REPLACES_HOSTS) or "0"
    if value not in ("0", "1"):
        raise EnvironmentFault(f"{REPLACES_HOSTS}={value} is neither 0 nor 1")
    return value == "1"


def rendezvous_seconds(default: float) -> float:
    """Seconds that processes wait for each other. EnvironmentFault where the variable is no positive number."""
    text = os.environ.get(RENDEZVOUS_S) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86400:
        raise EnvironmentFault(f"{RENDEZVOUS_S}={text} is not a number of seconds up to a day")
    return seconds
