"""What was launched from here: runs/NAME/launch.json, so that status, logs, stop and down know where to look."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtrain.errors import DtrainError, EnvironmentFault, LeftBehind, RecipeError
from dtrain.folder import Folder, folder, overwrite
from dtrain.launch.job import Job

NAME = "launch.json"


@dataclass(frozen=True)
class Entry:
    """One launch: the target's section as plain values, and the job."""

    target: dict[str, Any]
    name: str
    recipe: str
    handle: dict[str, str]
    since: float
    ground: dict[str, Any] = field(default_factory=dict)
    """The Terraform that was applied before, if any: its folder and variables."""

    def text(self) -> str:
        """As it is noted."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def write(self, place: Folder) -> None:
        """Note it. EnvironmentFault where that cannot be done."""
        try:
            place.path.mkdir(parents=True, exist_ok=True)
            overwrite(place.path / NAME, self.text())
        except OSError as error:
            raise EnvironmentFault(f"cannot note the launch in {place.path}: {error.strerror}") from error


def entry_of(job: Job) -> Entry:
    """A launch that begins now."""
    return Entry(dict(job.section), job.name, job.recipe, dict(job.handle), time.time())


@contextmanager
def noted(runs: Path, entry: Entry, before: Entry | None) -> Iterator[None]:
    """Note a launch while it is made; where that fails and nothing is left, what was noted before stands again."""
    place = folder(runs, entry.name)
    fresh = not place.path.exists()
    entry.write(place)
    try:
        yield
    except LeftBehind:
        raise
    except DtrainError:
        (place.path / NAME).unlink()
        if before:
            before.write(place)
        elif fresh:
            with suppress(OSError):  # those that are empty
                place.path.rmdir()
                place.path.parent.rmdir()
        raise


def find(runs: Path, name: str) -> Entry | None:
    """The launch of that name, if there is one."""
    return _read(folder(runs, name).path / NAME)


def entry(runs: Path, name: str) -> Entry:
    """The launch of that name; RecipeError where there is none."""
    found = find(runs, name)
    if found is None:
        known = ", ".join(one.name for one in entries(runs)) or "none"
        raise RecipeError(f"no run {name!r} was launched from here; there are: {known}", "dtrain launch list")
    return found


def entries(runs: Path) -> list[Entry]:
    """All launches, the newest first."""
    found = [one for one in map(_read, runs.glob(f"*/{NAME}")) if one]
    return sorted(found, key=lambda one: -one.since)


def forget(runs: Path, name: str) -> None:
    """Strike it off."""
    (folder(runs, name).path / NAME).unlink(missing_ok=True)


def _read(path: Path) -> Entry | None:
    try:
        found = json.loads(path.read_text())
        return Entry(**found)
    except (OSError, ValueError, TypeError, KeyError):
        return None
