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
from dataclasses import asdict, replace
from pathlib import Path

from dtrain.core.errors import DtrainError, EnvironmentFault, LeftBehind, RecipeError
from dtrain.core.run_dir import Folder, folder, overwrite
from dtrain.launch.job import LaunchJob
from dtrain.launch.wire import adapter

NAME = "launch.json"


def record_of(job: LaunchJob, dollars_hour: float | None = None) -> LaunchJob:
    """The record of a launch that begins now."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = "unknown"
    return replace(job, since=time.time(), owner=f"{user}@{socket.gethostname()}", dollars_hour=dollars_hour)


def text(job: LaunchJob) -> str:
    """A record as it is written."""
    return json.dumps({key: value for key, value in asdict(job).items() if key != "folder"}, indent=2) + "\n"


def write(place: Folder, job: LaunchJob) -> None:
    """Write a record. EnvironmentFault where that cannot be done."""
    try:
        place.path.mkdir(parents=True, exist_ok=True)
        overwrite(place.path / NAME, text(job))
    except OSError as error:
        raise EnvironmentFault(f"cannot write the launch record in {place.path}: {error.strerror}") from error


@contextmanager
def recorded(runs: Path, record: LaunchJob, before: LaunchJob | None) -> Iterator[None]:
    """Keep a record while the launch is made. Where `up` fails and leaves nothing behind, the one before is put back;
    after LeftBehind or an interrupt the record stays, so that `down` finds what may still run."""
    place = folder(runs, record.name)
    fresh = not place.path.exists()
    write(place, record)
    try:
        yield
    except LeftBehind:
        raise
    except DtrainError:
        (place.path / NAME).unlink(missing_ok=True)
        if before:
            write(place, before)
        elif fresh:
            with suppress(OSError):  # removes empty folders alone
                place.path.rmdir()
                place.path.parent.rmdir()
        raise


def find(runs: Path, name: str) -> LaunchJob | None:
    """The record of that name, if there is one."""
    return _read(folder(runs, name).path / NAME)


def record(runs: Path, name: str) -> LaunchJob:
    """The record of that name; RecipeError where there is none."""
    if found := find(runs, name):
        return found
    known = ", ".join(one.name for one in records(runs)) or "none"
    message = f"no launch record of {name!r} in {runs}; there are: {known}"
    raise RecipeError(message, "for a run that was launched from another machine, give its recipe file instead")


def records(runs: Path) -> list[LaunchJob]:
    """All records that can be read, the newest first."""
    found = [one for one in map(_read, runs.glob(f"*/{NAME}")) if one]
    return sorted(found, key=lambda one: -one.since)


def unreadable(runs: Path) -> list[Path]:
    """Files with the name of a record that hold none, are of a later version, or belong to another user."""
    return sorted(path for path in runs.glob(f"*/{NAME}") if _read(path) is None)


def forget(runs: Path, name: str) -> None:
    """Remove the record."""
    (folder(runs, name).path / NAME).unlink(missing_ok=True)


def _read(path: Path) -> LaunchJob | None:
    """What earlier versions wrote has other keys beside these, which are ignored. A record of another user is not
    read: it can name commands, as `proxy` of kind ssh, that would run here."""
    with suppress(OSError, ValueError):
        if path.stat().st_uid in (os.getuid(), 0):
            return adapter(LaunchJob).validate_json(path.read_text(), strict=True)
    return None
