"""A lease on a run folder: only one run at a time writes to it, and the lease of a dead owner is taken over.

The file identifies its owner by host, boot id, process id and process start time, so that a reused process id is not
mistaken for the owner. On the same host a dead owner is detected at once. The lease of another host expires when its
file has not been touched for EXPIRY seconds, measured by the clock of the shared file system.
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

from dtrain.core.errors import EnvironmentFault, Locked, TakenOver
from dtrain.core.files import overwrite, read_json
from dtrain.core.process_info import launch_id
from dtrain.core.types import JsonObject

TOUCH, EXPIRY = 5.0, 60.0
"""Seconds between touches of the file, and seconds without a touch after which the lease of another host expires."""


@dataclass(frozen=True)
class Lease:
    """An acquired lease: the right to write to a run folder."""

    path: Path
    token: str
    """Random text in the file that identifies this lease."""
    folder: tuple[int, int]
    """Device and inode of the run folder."""

    def check(self) -> None:
        """Check that this process still holds the lease.

        Raises Taken if another run has taken the folder over, Locked if the file was removed or damaged,
        EnvironmentFault if the folder was moved or deleted.
        """
        current = _read(self.path)
        if current.get("token") == self.token:
            return
        if current:
            raise TakenOver(f"another run has taken over {self.path.parent}; this run stops writing to it")
        if _identity(self.path.parent) != self.folder:
            message = f"{self.path.parent} no longer exists: it was moved or deleted while the run wrote to it"
            raise EnvironmentFault(message, "move it back and run the same command again; its checkpoints are in it")
        message = f"{self.path} was removed or damaged; another run may write to that folder, so this run stops"
        raise Locked(message, "run the same command again")

    def release(self) -> None:
        """Remove the lease file, so that other runs can use the folder."""
        self.check()
        self.path.unlink()


@contextmanager
def hold_lease(path: Path, say: Callable[[str], None]) -> Iterator[Lease]:
    """Hold the lease stored in that file within the context. Locked if a running process holds it.

    `say` prints a line: when it waits for a lease to expire, and when it takes one over.
    """
    lease, done = Lease(path, secrets.token_hex(8), _identity(path.parent)), threading.Event()
    if launch_id():
        _await_expiry(path, say)
    _acquire(lease, say)
    renewal = threading.Thread(target=_touch_regularly, args=(lease, done), name="lease", daemon=True)
    renewal.start()
    try:
        yield lease
    finally:
        done.set()
        renewal.join()
        with suppress(Locked, EnvironmentFault, OSError):
            lease.release()


def in_use(path: Path) -> bool:
    """Whether a running process may hold the lease stored in that file."""
    try:
        return path.exists() and _alive(_read(path), path)
    except OSError:
        return False


def _await_expiry(path: Path, say: Callable[[str], None]) -> None:
    """Wait until the lease of another host expires or is touched, which proves that its owner is alive.

    An engine restarts a launched run within seconds of a hard kill, in a new container or on a new machine, where
    the process table cannot show that the previous owner has died.
    """
    if not in_use(path) or _is_same_host(_read(path)):
        return
    touched, end = _touch_time(path), time.monotonic() + 1.5 * EXPIRY
    say(f"waiting up to {EXPIRY:.0f} s for the lease {path} to expire: its owner on another host may have died")
    while in_use(path) and _touch_time(path) == touched and time.monotonic() < end:
        time.sleep(min(TOUCH, EXPIRY / 10))


def _touch_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _acquire(lease: Lease, say: Callable[[str], None]) -> None:
    lock = os.open(lease.path.parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    with os.fdopen(lock, "wb") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # only one of several processes takes over from the same dead owner
        if lease.path.exists():
            owner = _read(lease.path)
            who = f"process {owner.get('pid', '?')} on {owner.get('host', 'an unknown host')}"
            if _alive(owner, lease.path):
                raise _locked(lease.path, owner, who)
            say(f"took over the stale lease of {who}" if owner else f"took over {lease.path}, which names no owner")
        values = {"token": lease.token, "since": time.time(), **_self()}
        overwrite(lease.path, json.dumps(values))


def _locked(path: Path, owner: JsonObject, who: str) -> Locked:
    if not owner:
        message = f"{path} names no owner and was written less than {EXPIRY:.0f} s ago: a run may use the folder"
        return Locked(message, f"wait {EXPIRY:.0f} s and try again, or remove that file if no run uses the folder")
    since = ""
    with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):  # missing, or not a valid time
        since = time.strftime(", since %Y-%m-%d %H:%M:%S", time.localtime(float(owner["since"])))
    message = f"{path.parent} is in use by {who}{since}"
    return Locked(message, f"stop that run, or give this one another name: name=... ({path})")


def _alive(owner: dict[str, object], path: Path) -> bool:
    """Whether the process that wrote the lease may still be running."""
    if _is_same_host(owner):
        return owner.get("born") is not None and owner["born"] == start_time(owner.get("pid"))
    probe = path.with_suffix(".now")  # reads the clock of the file system, which may differ from this host's
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now - path.stat().st_mtime < EXPIRY


def _is_same_host(owner: dict[str, object]) -> bool:
    return all(owner.get(name) == value for name, value in _host().items())


def _touch_regularly(lease: Lease, done: threading.Event) -> None:
    while not done.wait(TOUCH):
        with suppress(Locked, EnvironmentFault, OSError):
            lease.check()
            os.utime(lease.path)


def _identity(folder: Path) -> tuple[int, int]:
    """Device and inode of a folder; (0, 0) if it does not exist."""
    try:
        status = folder.stat()
    except OSError:
        return (0, 0)
    return status.st_dev, status.st_ino


def _self() -> JsonObject:
    """The owner fields of a lease of this process."""
    return _host() | {"pid": os.getpid(), "born": start_time(os.getpid())}


def _host() -> dict[str, str]:
    """What makes a process id unique: host name, boot id and pid namespace (which differs between containers)."""
    fields = {"host": socket.gethostname(), "boot": "", "space": ""}
    with suppress(OSError):
        fields["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields["space"] = str(Path("/proc/self/ns/pid").readlink())
    return fields


def start_time(pid: object) -> str | None:
    """Start time of a process in the operating system's own format; None if no such process is running."""
    if not isinstance(pid, int):
        return None
    if not Path("/proc/self").exists():  # macOS
        command = ["ps", "-o", "lstart=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]  # proc(5): state (zombie, dead) and starttime


def _read(path: Path) -> JsonObject:
    """The fields of the lease file; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        fields = read_json(path)
        if isinstance(fields, dict):
            return fields
    return {}
