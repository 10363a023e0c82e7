"""What a host says where the laptop can read it: a mark of how it stands, and what its run prints."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dtrain.folder import overwrite
from dtrain.launch import roll
from dtrain.launch.seat import Seat

SOON, SAID = 1.0, 10.0
"""Seconds between marks that differ, and while nothing changes."""
FIRST, LAST = 2.0, 30.0
"""Seconds between shipped lines, when it begins and later."""


@dataclass
class Voice:
    """One host's, in the run's launch folder."""

    place: Path
    launch: str
    seat: Seat
    _said: tuple[float, str] = (0.0, "")
    _lines: list[bytes] = field(default_factory=list)
    _shipped: float = 0.0
    _since: float = field(default_factory=time.monotonic)

    def say(self, state: str, what: str, code: int | None, saved: int, deaths: int, soon: bool) -> None:
        """Leave a mark, where there is something new or it is time."""
        now, words = time.monotonic(), f"{state} {what}"
        if code is None and not soon and now - self._said[0] < (SOON if words != self._said[1] else SAID):
            return
        self._said = (now, words)
        mark = roll.Mark(self.launch, self.seat.rank, self.seat.name, time.time(), state, what, code, saved, deaths)
        try:
            mark.write(self.place)
        except OSError as error:
            print(f"nothing can be said in {self.place}: {error.strerror}", flush=True)

    def hear(self, said: IO[bytes]) -> None:
        """Take what the run prints, to the end."""
        with said:
            for line in said:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
                self._lines.append(line)

    def ship(self, last: bool = False) -> None:
        """Pass it on, less often as time goes by. OSError where that fails: it is tried again with the next lines."""
        now = time.monotonic()
        apart = min(LAST, FIRST + (now - self._since) / 20)
        if not self._lines or (now - self._shipped < apart and not last):
            return
        lines, self._shipped = list(self._lines), now
        name = f"{self.launch}-{self.seat.rank:05d}-{time.time_ns() // 10**6:013d}.txt"
        (self.place / "log").mkdir(exist_ok=True)
        overwrite(self.place / "log" / name, b"".join(lines).decode(errors="replace"))
        del self._lines[: len(lines)]
