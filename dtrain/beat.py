"""A process's sign of life: where it is and how long it may stay there, in a file that others read at any time."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH = 200
APART = 0.005
"""Seconds between what is said of steps, so that short ones are not held up."""
LONG = 10
"""How many times as long as a step the sections may take that work once: compile, restore, save, evaluate."""


class Beat:
    """One line, written over and over in place: six microseconds each time."""

    def __init__(self, path: Path, patience: float) -> None:
        """`patience`: seconds that a step may take."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._patience, self._number = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), patience, 0
        self.step, self._again = 0, 0.0
        self("start")

    def __call__(self, section: str) -> None:
        """Say that this section begins."""
        now, short = time.monotonic(), section in ("step", "data")
        if short and now < self._again:
            return
        self._again = now + APART
        self._number += 1
        patience = self._patience * (1 if short else LONG)
        line = {"number": self._number, "section": section, "step": self.step}
        text = json.dumps(line | {"patience": patience, "at": time.time()})
        os.pwrite(self._file, f"{text:<{WIDTH}}\n".encode(), 0)

    def close(self) -> None:
        """No more is said."""
        os.close(self._file)


@dataclass(frozen=True)
class Sign:
    """What was last said."""

    number: int = 0
    section: str = "start"
    step: int = 0
    patience: float = 600.0
    at: float = 0.0
    """Seconds since 1970, by the clock of that process's machine."""


def read(path: Path) -> Sign | None:
    """The last sign of life; None where there is none that can be read."""
    try:
        found: Any = json.loads(path.read_bytes())
        return Sign(**found)
    except (OSError, ValueError, TypeError):
        return None
