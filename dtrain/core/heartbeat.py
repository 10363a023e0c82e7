"""The heartbeat of a process: its current section and that section's time limit, in a file read by its supervisor.

It is written up to a few hundred times per second and never synced; `Folder.heartbeat` keeps it off mounted buckets.
"""

import errno
import json
import os
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WIDTH = 200
LARGEST = 1e300
APART = 0.005
"""Minimum seconds between two writes for `step` or `data` sections, so that short steps are not slowed down."""
LONG = 10
"""Factor on the time limit of a step for sections other than step and data: compile, restore, save, evaluate."""


class HeartbeatWriter:
    """Writes the heartbeat: one line, overwritten in place, in about six microseconds."""

    def __init__(self, path: Path, patience: float) -> None:
        """`patience`: time limit of a step in seconds. OSError if the path is not a regular file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._patience, self._number = _opened(path, os.O_WRONLY | os.O_CREAT), patience, 0
        self.step, self._section, self._turn = 0, "", (0, 0)
        self._since, self._first = time.time(), 0
        self._next = {"step": 0.0, "data": 0.0}  # short sections: earliest time of the next write
        self("start")
        os.ftruncate(self._file, WIDTH + 1)  # removes old content after the line

    def __call__(self, section: str) -> None:
        """Record that this section begins."""
        now, short = time.monotonic(), section in self._next
        # always write the change to `step`: the file must not keep showing a section that has ended
        ended = section == "step" and self._section != "step"
        if short and now < self._next[section] and not ended:
            return
        if short:
            self._next[section] = now + APART
        self._section, self._number = section, self._number + 1
        self._turn = self.step, self._turn[1] + 1 if self._turn[0] == self.step else 0
        patience = self._patience * (1 if short else LONG)
        line = {"number": self._number, "section": section, "step": self.step, "turn": self._turn[1]}
        line |= {"patience": patience, "at": time.time(), "since": self._since, "first": self._first}
        text = json.dumps(line)
        os.pwrite(self._file, f"{text:<{WIDTH}}\n".encode(), 0)

    def resumed(self, step: int) -> None:
        """Record the step that this process trains on from."""
        self.step = self._first = step

    def close(self) -> None:
        """Close the file; no heartbeat is written after this."""
        os.close(self._file)


@dataclass(frozen=True)
class Heartbeat:
    """The latest heartbeat of a process."""

    number: int = 0
    """Counts the heartbeats of the process."""
    section: str = "start"
    step: int = 0
    patience: float = 600.0
    """Time limit of the section in seconds."""
    at: float = 0.0
    """Time of writing, in seconds since 1970 by the clock of the process's host."""
    turn: int = 0
    """Number of earlier sections at this step: of two processes, the one that waits for the other has the higher."""
    since: float = 0.0
    """Time at which the process began, by the same clock: it tells a restarted process from the one before."""
    first: int = 0
    """The step that the process trains on from; 0 until it has restored one."""


def read(path: Path) -> Heartbeat | None:
    """The latest heartbeat; None if the file is missing or not valid."""
    try:
        with os.fdopen(_opened(path, os.O_RDONLY), "rb") as file:
            content: Any = json.loads(file.read())
        latest = Heartbeat(**content)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    types_match = all(isinstance(value, str) == (name == "section") for name, value in asdict(latest).items())
    numbers = (value for name, value in asdict(latest).items() if name != "section")
    return latest if types_match and all(map(_finite, numbers)) else None


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def _opened(path: Path, flags: int) -> int:
    """Open a regular file; OSError for any other kind, such as a FIFO, which would block."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.ENXIO, "not a file", str(path))
    return handle
