"""Launch records: runs/NAME/launch.json, which status, logs, stop and down read to find a run.

A record is written on the machine where `up` is run, before anything is created. A machine that does not share the
folder with it finds the run by its recipe (`LaunchTarget.find`).
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
from dtrain.core.files import overwrite
from dtrain.core.run_dir import Folder, folder
from dtrain.launch.job import LaunchJob
from dtrain.launch.wire import adapter

NAME = "launch.json"


def record_of(job: LaunchJob, dollars_hour: float | None = None) -> LaunchJob:
    """The record of a launch that starts now."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = "unknown"
    return replace(job, since=time.time(), owner=f"{user}@{socket.gethostname()}", dollars_hour=dollars_hour)


def text(job: LaunchJob) -> str:
    """A record as JSON."""
    return json.dumps({key: value for key, value in asdict(job).items() if key != "folder"}, indent=2) + "\n"


def write(run: Folder, job: LaunchJob) -> None:
    """Write a record to the run folder. EnvironmentFault if that fails."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        overwrite(run.path / NAME, text(job))
    except OSError as error:
        raise EnvironmentFault(f"cannot write the launch record in {run.path}: {error.strerror}") from error


@contextmanager
def recorded(runs: Path, record: LaunchJob, before: LaunchJob | None) -> Iterator[None]:
    """Write a record before the launch starts. If `up` fails and leaves nothing behind, the earlier record is restored;
    after LeftBehind or an interrupt the new record stays, so that `down` finds what may still be running."""
    run = folder(runs, record.name)
    fresh = not run.path.exists()
    write(run, record)
    try:
        yield
    except LeftBehind:
        raise
    except DtrainError:
        (run.path / NAME).unlink(missing_ok=True)
        if before:
            write(run, before)
        elif fresh:
            with suppress(OSError):  # rmdir removes only empty folders
                run.path.rmdir()
                run.path.parent.rmdir()
        raise


def find(runs: Path, name: str) -> LaunchJob | None:
    """The record of that name; None if there is none."""
    return _read(folder(runs, name).path / NAME)


def record(runs: Path, name: str) -> LaunchJob:
    """The record of that name; RecipeError if there is none."""
    if found := find(runs, name):
        return found
    known = ", ".join(job.name for job in records(runs)) or "none"
    message = f"no launch record of {name!r} in {runs}; recorded are: {known}"
    raise RecipeError(
        message, "for a run that was launched from another machine, give its recipe file instead of its name"
    )


def records(runs: Path) -> list[LaunchJob]:
    """All readable records, newest first."""
    jobs = [job for job in map(_read, runs.glob(f"*/{NAME}")) if job]
    return sorted(jobs, key=lambda job: -job.since)


def unreadable(runs: Path) -> list[Path]:
    """Record files that cannot be read: invalid, of a later version, or owned by another user."""
    return sorted(path for path in runs.glob(f"*/{NAME}") if _read(path) is None)


def forget(runs: Path, name: str) -> None:
    """Remove the record."""
    (folder(runs, name).path / NAME).unlink(missing_ok=True)


def _read(path: Path) -> LaunchJob | None:
    """The record in the file; None if it cannot be read. Additional keys of earlier versions are ignored. A record of
    another user is not read: it could contain commands, as `proxy` of kind ssh, that would run on this machine."""
    with suppress(OSError, ValueError):
        if path.stat().st_uid in (os.getuid(), 0):
            return adapter(LaunchJob).validate_json(path.read_text(), strict=True)
    return None
