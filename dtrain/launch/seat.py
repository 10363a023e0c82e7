"""Which of a run's hosts this one is, as the cloud tells it."""

import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.errors import EnvironmentFault
from dtrain.launch import google

PAUSE = 5.0
LONGEST = 3600.0
"""Seconds in which all instances of a group are there."""


@dataclass(frozen=True)
class Seat:
    """A host among those of its run."""

    rank: int
    hosts: int
    name: str
    zone: str
    first: str
    """The address of the host of rank 0, where all meet."""

    def environment(self) -> dict[str, str]:
        """What `dtrain run` is told of it; nothing where it is alone."""
        return {"DTRAIN_PROCESS": f"{self.rank}/{self.hosts}@{self.first}"} if self.hosts > 1 else {}


def seat_of(told: Mapping[str, Any]) -> Seat:
    """The seat of this host. EnvironmentFault where the cloud does not tell it."""
    zone = (google.metadata("instance/zone") or "").rpartition("/")[2]
    name = google.metadata("instance/hostname") or socket.gethostname()
    if told["group"]:
        rank, names = _among(told, zone, name.partition(".")[0])
    else:
        rank, names = _worker(told)
    return Seat(rank, told["hosts"], name.partition(".")[0], zone, f"{names[0]}:{told['port']}")


def _worker(told: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Rank and addresses on TPU VMs: worker-network-endpoints has addresses, or name:id:address of each worker of a
    slice; tpu-env tells of several slices (jax/_src/clusters/cloud_tpu_cluster.py reads the same)."""
    number = google.metadata("instance/attributes/agent-worker-number")
    workers = google.metadata("instance/attributes/worker-network-endpoints")
    if number is None or not workers:
        raise EnvironmentFault("the metadata server does not tell which worker of a TPU this is")
    addresses = [worker.rpartition(":")[2] for worker in workers.split(",")]
    if told["slices"] == 1:
        return int(number), addresses
    lines = (google.metadata("instance/attributes/tpu-env") or "").splitlines()
    found = dict(re.findall(r"^\s*(MEGASCALE_\w+):\s*'?([^']*)'?\s*$", "\n".join(lines), re.MULTILINE))
    if "MEGASCALE_SLICE_ID" not in found or "MEGASCALE_COORDINATOR_ADDRESS" not in found:
        raise EnvironmentFault("the metadata server does not tell which slice this is")
    first = found["MEGASCALE_COORDINATOR_ADDRESS"].partition(":")[0]
    return int(number) + int(found["MEGASCALE_SLICE_ID"]) * len(addresses), [first]


def _among(told: Mapping[str, Any], zone: str, name: str) -> tuple[int, list[str]]:
    """Rank and names in an instance group, by name; instances that are made again keep theirs."""
    path = f"projects/{told['project']}/zones/{zone}/instanceGroupManagers/{told['group']}/listManagedInstances"
    end = time.monotonic() + LONGEST
    while True:
        found = google.ask("POST", "compute", path).get("managedInstances", [])
        names = sorted(one["instance"].rpartition("/")[2] for one in found)
        if len(names) == told["hosts"] and name in names:
            return names.index(name), names
        if time.monotonic() > end:
            raise EnvironmentFault(f"{told['group']} has {len(names)} of {told['hosts']} instances: {', '.join(names)}")
        time.sleep(PAUSE)
