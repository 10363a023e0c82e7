"""Launch records: runs/NAME/launch.json, by which status, logs, stop and down find a run again.

One is written on the machine where `up` is typed, before anything is made. Where that machine does not share the
run's folder, another machine finds the run by its recipe (`Target.find`).
"""

import getpass
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dtrain.errors import DtrainError, EnvironmentFault, LeftBehind, RecipeError
from dtrain.folder import Folder, folder, overwrite
from dtrain.launch.job import Job

NAME = "launch.json"
VERSION = 2


@dataclass(frozen=True)
class LaunchRecord:
    """One launch: the target's section as plain values, the job, who launched it and when."""

    target: dict[str, Any]
    name: str
    recipe: str
    handle: dict[str, str]
    since: float
    """Seconds since 1970."""
    launch: str = ""
    owner: str = ""
    """user@machine."""
    dollars_hour: float | None = None
    version: int = field(default=VERSION, kw_only=True)

    def text(self) -> str:
        """As it is written."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def write(self, place: Folder) -> None:
        """Write it. EnvironmentFault where that cannot be done."""
        try:
            place.path.mkdir(parents=True, exist_ok=True)
            overwrite(place.path / NAME, self.text())
        except OSError as error:
            raise EnvironmentFault(f"cannot write the launch record in {place.path}: {error.strerror}") from error

    def job(self) -> Job:
        """The job, as the target's verbs take it."""
        return Job(self.name, self.recipe, self.launch, self.handle, self.target)


def record_of(job: Job, dollars_hour: float | None = None) -> LaunchRecord:
    """The record of a launch that begins now."""
    handle, target = dict(job.handle), dict(job.section)
    return LaunchRecord(target, job.name, job.recipe, handle, time.time(), job.launch, owner(), dollars_hour)


def owner() -> str:
    """user@machine, of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


@contextmanager
def recorded(runs: Path, record: LaunchRecord, before: LaunchRecord | None) -> Iterator[None]:
    """Keep a record while the launch is made. Where `up` fails and leaves nothing behind, the one before is put back;
    after LeftBehind or an interrupt the record stays, so that `down` finds what may still run."""
    place = folder(runs, record.name)
    fresh = not place.path.exists()
    record.write(place)
    try:
        yield
    except LeftBehind:
        raise
    except DtrainError:
        (place.path / NAME).unlink(missing_ok=True)
        if before:
            before.write(place)
        elif fresh:
            with suppress(OSError):  # removes empty folders alone
                place.path.rmdir()
                place.path.parent.rmdir()
        raise


def find(runs: Path, name: str) -> LaunchRecord | None:
    """The record of that name, if there is one."""
    return _read(folder(runs, name).path / NAME)


def record(runs: Path, name: str) -> LaunchRecord:
    """The record of that name; RecipeError where there is none."""
    found = find(runs, name)
    if found is None:
        known = ", ".join(one.name for one in records(runs)) or "none"
        message = f"no launch record of {name!r} in {runs}; there are: {known}"
        raise RecipeError(message, "for a run that was launched from another machine, give its recipe file instead")
    return found


def records(runs: Path) -> list[LaunchRecord]:
    """All records that can be read, the newest first."""
    found = [one for one in map(_read, runs.glob(f"*/{NAME}")) if one]
    return sorted(found, key=lambda one: -one.since)


def unreadable(runs: Path) -> list[Path]:
    """Files with the name of a record that hold none, are of a later version, or belong to another user."""
    return sorted(path for path in runs.glob(f"*/{NAME}") if _read(path) is None)


def forget(runs: Path, name: str) -> None:
    """Remove the record."""
    (folder(runs, name).path / NAME).unlink(missing_ok=True)


def _read(path: Path) -> LaunchRecord | None:
    """What earlier versions wrote has other keys beside these, which are ignored. A record of another user is not
    read: it can name commands, as `proxy` of kind ssh, that would run here."""
    try:
        if path.stat().st_uid not in (os.getuid(), 0):
            return None
        found = json.loads(path.read_text())
        known = {one.name for one in fields(LaunchRecord)}
        record = LaunchRecord(**{key: value for key, value in found.items() if key in known})
        return record if _is_sound(record) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _is_sound(record: LaunchRecord) -> bool:
    texts = (record.name, record.recipe, record.launch, record.owner, *record.handle, *record.handle.values())
    numbers = (record.since, record.version, record.dollars_hour or 0.0)
    return (
        isinstance(record.target, dict)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
        and record.version <= VERSION
    )
