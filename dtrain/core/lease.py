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

from dtrain.core.errors import EnvironmentFault, Locked, Taken
from dtrain.core.process_info import launch_id
from dtrain.core.run_dir import overwrite, read_json

TOUCH, EXPIRY = 5.0, 60.0
"""Seconds between touches, and without one after which a lease from elsewhere is over."""


@dataclass(frozen=True)
class Lease:
    """The right to write, while it is held."""

    path: Path
    token: str
    folder: tuple[int, int]
    """Device and number of the folder that it is about."""

    def holds(self) -> None:
        """Locked where another run has taken over meanwhile; EnvironmentFault where the folder is not there."""
        found = _read(self.path)
        if found.get("token") == self.token:
            return
        if found:
            raise Taken(f"another run has taken over {self.path.parent}; this one leaves it alone")
        if _identity(self.path.parent) != self.folder:
            message = f"{self.path.parent} is gone: it was moved or deleted while the run wrote to it"
            raise EnvironmentFault(message, "move it back and run the same command again; its checkpoints are in it")
        message = f"{self.path} was removed or damaged; another run may write to that folder, so this one stops"
        raise Locked(message, "run the same command again")

    def release(self) -> None:
        """Free the folder for other runs."""
        self.holds()
        self.path.unlink()


@contextmanager
def leased(path: Path, say: Callable[[str], None]) -> Iterator[Lease]:
    """Hold the lease kept in that file while inside. Locked where a living run holds it."""
    lease, done = Lease(path, secrets.token_hex(8), _identity(path.parent)), threading.Event()
    if launch_id():
        _outwait(path, say)
    _take(lease, say)
    beating = threading.Thread(target=_keep_touched, args=(lease, done), name="lease", daemon=True)
    beating.start()
    try:
        yield lease
    finally:
        done.set()
        beating.join()
        with suppress(Locked, EnvironmentFault, OSError):
            lease.release()


def in_use(path: Path) -> bool:
    """Whether a living run may hold the lease kept in that file."""
    try:
        return path.exists() and _alive(_read(path), path)
    except OSError:
        return False


def _outwait(path: Path, say: Callable[[str], None]) -> None:
    """Return when the lease of another host is over, or is kept. An engine starts a launched run again within seconds
    of a hard kill, in a new container or on a new machine, from where a dead owner is not seen at once."""
    if not in_use(path) or _is_here(_read(path)):
        return
    written, end = _written(path), time.monotonic() + 1.5 * EXPIRY
    say(f"waiting up to {EXPIRY:.0f} s: the owner of {path}, on another host, may be gone")
    while in_use(path) and _written(path) == written and time.monotonic() < end:
        time.sleep(min(TOUCH, EXPIRY / 10))


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _take(lease: Lease, say: Callable[[str], None]) -> None:
    lock = os.open(lease.path.parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    with os.fdopen(lock, "wb") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # two that find the same dead owner take turns
        if lease.path.exists():
            owner = _read(lease.path)
            who = f"process {owner.get('pid', '?')} on {owner.get('host', 'a host that it does not name')}"
            if _alive(owner, lease.path):
                raise _locked(lease.path, owner, who)
            say(f"took over from {who}, which is gone" if owner else f"took over {lease.path}, which names no process")
        values = {"token": lease.token, "since": time.time(), **_self()}
        overwrite(lease.path, json.dumps(values))


def _locked(path: Path, owner: dict[str, Any], who: str) -> Locked:
    if not owner:
        message = f"{path} names no process and was written less than {EXPIRY:.0f} s ago: a run may be using the folder"
        return Locked(message, f"wait {EXPIRY:.0f} s and try again, or remove that file if no run is using the folder")
    since = ""
    with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):  # where that is no time
        since = time.strftime(", since %Y-%m-%d %H:%M:%S", time.localtime(float(owner["since"])))
    message = f"{path.parent} is in use by {who}{since}"
    return Locked(message, f"stop that run, or give this one another name: name=... ({path})")


def _alive(owner: dict[str, Any], path: Path) -> bool:
    """Whether the process that wrote the lease may still be there."""
    if _is_here(owner):
        return owner.get("born") is not None and owner["born"] == start_time(owner.get("pid"))
    probe = path.with_suffix(".now")
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now - path.stat().st_mtime < EXPIRY


def _is_here(owner: dict[str, Any]) -> bool:
    return all(owner.get(name) == value for name, value in _here().items())


def _keep_touched(lease: Lease, done: threading.Event) -> None:
    while not done.wait(TOUCH):
        with suppress(Locked, EnvironmentFault, OSError):
            lease.holds()
            os.utime(lease.path)


def _identity(folder: Path) -> tuple[int, int]:
    try:
        found = folder.stat()
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def _self() -> dict[str, Any]:
    return _here() | {"pid": os.getpid(), "born": start_time(os.getpid())}


def _here() -> dict[str, str]:
    """Where a process number means the same process: a host, since it was started, outside of other containers."""
    found = {"host": socket.gethostname(), "boot": "", "space": ""}
    with suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["space"] = str(Path("/proc/self/ns/pid").readlink())
    return found


def start_time(pid: Any) -> str | None:
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
    """What the lease holds; empty where it cannot be read."""
    with suppress(OSError, ValueError):
        found = read_json(path)
        if isinstance(found, dict):
            return found
    return {}
