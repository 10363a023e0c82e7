"""A process's heartbeat: where it is and how long it may stay there, in a file that its host reads at any time.

It is written up to some hundred times a second, and never synced: `Folder.beat` keeps it off mounted buckets.
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
"""Seconds between what is said of steps, so that short ones are not held up."""
LONG = 10
"""How many times as long as a step the sections may take that work once: compile, restore, save, evaluate."""


class HeartbeatWriter:
    """One line, written over and over in place: six microseconds each time."""

    def __init__(self, path: Path, patience: float) -> None:
        """`patience`: seconds that a step may take."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._patience, self._number = _opened(path, os.O_WRONLY | os.O_CREAT), patience, 0
        self.step, self._section, self._turn = 0, "", (0, 0)
        self._next = {"step": 0.0, "data": 0.0}
        """When a section as short as these is written again."""
        self("start")
        os.ftruncate(self._file, WIDTH + 1)  # what another program left behind it

    def __call__(self, section: str) -> None:
        """Say that this section begins."""
        now, short = time.monotonic(), section in self._next
        ended = section == "step" and self._section != "step"  # what was written last is over: it is never left there
        if short and now < self._next[section] and not ended:
            return
        if short:
            self._next[section] = now + APART
        self._section, self._number = section, self._number + 1
        self._turn = self.step, self._turn[1] + 1 if self._turn[0] == self.step else 0
        patience = self._patience * (1 if short else LONG)
        line = {"number": self._number, "section": section, "step": self.step, "turn": self._turn[1]}
        text = json.dumps(line | {"patience": patience, "at": time.time()})
        os.pwrite(self._file, f"{text:<{WIDTH}}\n".encode(), 0)

    def close(self) -> None:
        """No more is said."""
        os.close(self._file)


@dataclass(frozen=True)
class Heartbeat:
    """What was last said."""

    number: int = 0
    section: str = "start"
    step: int = 0
    patience: float = 600.0
    at: float = 0.0
    """Seconds since 1970, by the clock of that process's machine."""
    turn: int = 0
    """How many sections began earlier after this step: of two processes, the one that waits has begun more."""


def read(path: Path) -> Heartbeat | None:
    """The last sign of life; None where there is none that can be read."""
    try:
        with os.fdopen(_opened(path, os.O_RDONLY), "rb") as file:
            found: Any = json.loads(file.read())
        latest = Heartbeat(**found)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    kinds = all(isinstance(value, str) == (name == "section") for name, value in asdict(latest).items())
    return (
        latest
        if kinds and all(map(_finite, (latest.number, latest.step, latest.patience, latest.at, latest.turn)))
        else None
    )


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def _opened(path: Path, how: int) -> int:
    """The file, opened; OSError where it is anything else, such as a FIFO, which would block."""
    handle = os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.ENXIO, "not a file", str(path))
    return handle
