"""A lease on a run folder: one run at a time writes to it, and that of a dead owner is taken over.

The file names its owner: host, boot, process and the moment that it was born, so that a number used
again is not taken for it. On one machine a dead owner is seen at once. On another, its lease is over
when its file was not touched for a while, by the clock of the file system that both write to.
"""

import fcntl
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.errors import Locked
from dtrain.folder import overwrite

BEAT, OVER = 5.0, 60.0
"""Seconds between touches, and without one after which a lease from elsewhere is over."""


@dataclass(frozen=True)
class Lease:
    """The right to write, while it is held."""

    path: Path
    token: str

    def holds(self) -> None:
        """Locked where another run has taken over meanwhile."""
        try:
            found = json.loads(self.path.read_text())
        except FileNotFoundError:
            found = {}
        if found.get("token") != self.token:
            raise Locked(f"another run has taken over {self.path.parent}; this one leaves it alone")


@contextmanager
def leased(path: Path, say: Callable[[str], None]) -> Iterator[Lease]:
    """Hold the lease kept in that file while inside. Locked where a living run holds it."""
    lease, done = Lease(path, secrets.token_hex(8)), threading.Event()
    _take(lease, say)
    beating = threading.Thread(target=_beat, args=(lease, done), name="lease", daemon=True)
    beating.start()
    try:
        yield lease
    finally:
        done.set()
        beating.join()
        with suppress(Locked, OSError, ValueError):
            lease.holds()
            path.unlink()


def _take(lease: Lease, say: Callable[[str], None]) -> None:
    with (lease.path.parent / ".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # two that find the same dead owner take turns
        if lease.path.exists():
            owner = _read(lease.path)
            who = f"process {owner.get('pid', '?')} on {owner.get('host', 'a host that it does not name')}"
            if _alive(owner, lease.path):
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.get("since", 0)))
                message = f"{lease.path.parent} is in use by {who}, since {since}"
                raise Locked(message, f"stop that run, or give this one another name: name=... ({lease.path})")
            say(f"took over from {who}, which is gone")
        values = {"token": lease.token, "since": time.time(), **_self()}
        overwrite(lease.path, json.dumps(values))


def _alive(owner: dict[str, Any], path: Path) -> bool:
    """Whether the process that wrote the lease may still be there."""
    if all(owner.get(name) == value for name, value in _here().items()):
        return owner.get("born") is not None and owner["born"] == born(owner.get("pid"))
    probe = path.with_suffix(".now")
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now - path.stat().st_mtime < OVER


def _beat(lease: Lease, done: threading.Event) -> None:
    while not done.wait(BEAT):
        with suppress(OSError, ValueError, Locked):
            lease.holds()
            os.utime(lease.path)


def _self() -> dict[str, Any]:
    return _here() | {"pid": os.getpid(), "born": born(os.getpid())}


def _here() -> dict[str, str]:
    """Where a process number means the same process: a host, since it was started, outside of other containers."""
    found = {"host": socket.gethostname(), "boot": "", "space": ""}
    with suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["space"] = str(Path("/proc/self/ns/pid").readlink())
    return found


def born(pid: Any) -> str | None:
    """The moment that a process began, as the system tells it; None where there is no such process."""
    if not isinstance(pid, int):
        return None
    if not Path("/proc/self").exists():
        asked = ["ps", "-o", "lstart=", "-p", str(pid)]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}
