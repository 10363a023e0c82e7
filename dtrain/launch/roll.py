"""The roll of a run's hosts: what each says of itself, in a small file that all of them and the laptop can read."""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.folder import overwrite

PATTERN = "host-*.json"
LEAVING = "leaving"
FRESH = 60.0
"""Seconds after which a host that has said nothing is taken as gone."""


@dataclass(frozen=True)
class Mark:
    """One host, as it last said."""

    launch: str
    """Which launch it belongs to; marks of earlier ones are passed over."""
    rank: int
    host: str
    at: float
    """Seconds since 1970, by its own clock."""
    state: str
    """waiting, running, leaving (it will be back, or another in its place), or ended."""
    what: str = ""
    code: int | None = None
    """How the run ended there for good."""
    saved: int = -1
    """The newest step that was saved."""
    deaths: int = 0
    """Starts that ended badly since then."""

    def there(self) -> bool:
        """Whether it was heard lately, and is not on its way out."""
        return self.state != LEAVING and time.time() - self.at < FRESH

    def write(self, folder: Path) -> None:
        """Say it."""
        overwrite(folder / f"host-{self.rank:05d}.json", json.dumps(asdict(self)) + "\n")


def marks(lines: Iterable[str], launch: str) -> dict[int, Mark]:
    """By rank, those of this launch."""
    found = {}
    for line in lines:
        try:
            mark = Mark(**json.loads(line))
        except (ValueError, TypeError):
            continue  # half written
        if mark.launch == launch:
            found[mark.rank] = mark
    return dict(sorted(found.items()))


def read(folder: Path, launch: str) -> dict[int, Mark]:
    """Those in a folder."""
    lines = []
    for path in folder.glob(PATTERN):
        try:
            lines.append(path.read_text())
        except OSError:
            continue
    return marks(lines, launch)


def ended(found: dict[int, Mark]) -> Mark | None:
    """The host that ended for good first, if any has."""
    over = [mark for mark in found.values() if mark.code is not None]
    return min(over, key=lambda mark: mark.at, default=None)


def where(sign: Mapping[str, Any] | None, record: Mapping[str, Any], now: float) -> str:
    """Where a run is, from a process's last sign of life and run.json."""
    saved = f"step {record['step']}/{record['steps']} saved" if record.get("steps") else ""
    if sign is None:
        return f"starting; {saved}".rstrip("; ")
    silent = now - sign["at"]
    late = f", silent for {silent:.0f} s" if silent > sign["patience"] / 10 else ""
    return f"in {sign['section']} after step {sign['step']}{late}; {saved}".rstrip("; ")
