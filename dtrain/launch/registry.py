"""Launch records: runs/NAME/launch.json, which status, logs, stop and down read to find a run.

A record is written on the machine where `up` is run, before anything is created. A machine that does not share the
folder with it finds the run by its recipe (`LaunchTarget.find`).

A record names commands that run on this machine, such as `proxy` of kind ssh, and may come with a folder of somebody
else's. So it is signed with a key in the user's configuration folder, and one without that signature is not used.
"""

import fcntl
import getpass
import hashlib
import hmac
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from dtrain.core.errors import DtrainError, EnvironmentFault, LeftBehind, Locked, RecipeError
from dtrain.core.files import overwrite, read_regular
from dtrain.core.run_dir import Folder, folder
from dtrain.core.types import JsonObject
from dtrain.launch.job import LaunchJob, LaunchTarget, Say
from dtrain.launch.wire import adapter

NAME, SIGNATURE = "launch.json", "signature"
NOT_RECORDED = ("folder", "extras", "needs", "allow_changes")
"""Fields of `LaunchJob` that are not in a record."""
FOREIGN = "was not written by you on this machine, so nothing in it is used"


def record_of(job: LaunchJob, dollars_hour: float | None = None) -> LaunchJob:
    """The record of a launch that starts now."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = "unknown"
    return replace(job, since=time.time(), owner=f"{user}@{socket.gethostname()}", dollars_hour=dollars_hour)


def text(job: LaunchJob) -> str:
    """A record as JSON."""
    values = {key: value for key, value in asdict(job).items() if key not in NOT_RECORDED}
    return json.dumps(signed(values), indent=2) + "\n"


def signed(values: JsonObject) -> JsonObject:
    """The values of a record with their signature. EnvironmentFault if there is no key and none can be made."""
    return {**values, SIGNATURE: _signature(values, _key(make=True))}


def _signature(values: JsonObject, key: bytes) -> str:
    plain = {name: value for name, value in values.items() if name != SIGNATURE}
    return hmac.new(key, json.dumps(plain, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(make: bool = False) -> bytes:
    """The secret of this user; empty if there is none."""
    path = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "dtrain" / "launch.key"
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}-{os.getpid()}")  # another command may make it at the same time
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            with suppress(FileExistsError):
                path.hardlink_to(part)
            part.unlink()
        return path.read_bytes()
    except OSError as error:
        if make:
            raise EnvironmentFault(f"cannot make a key for launch records: {path}: {error.strerror}") from error
        return b""


def write(run: Folder, job: LaunchJob) -> None:
    """Write a record to the run folder. EnvironmentFault if that fails."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        overwrite(run.path / NAME, text(job))
    except OSError as error:
        raise EnvironmentFault(f"cannot write the launch record in {run.path}: {error.strerror}") from error


@contextmanager
def alone(runs: Path, name: str) -> Iterator[None]:
    """Hold the lock of a launch that starts, so that two commands do not read and replace its record at the same time.

    Locked if another command of this user on this machine holds it.
    """
    place = hashlib.sha256(str(folder(runs, name).path.absolute()).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"dtrain-launch-{os.getuid()}-{place}.lock")
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EnvironmentFault(f"cannot lock this launch: {path}: {error.strerror}", "set TMPDIR") from error
    with os.fdopen(handle, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            hint = f"wait for it, then: dtrain launch status {name}"
            raise Locked(f"another `launch up` of {name} is starting it now", hint) from error
        yield


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


def start(
    runs: Path, target: LaunchTarget, job: LaunchJob, dollars_hour: float | None, before: LaunchJob | None, say: Say
) -> LaunchJob:
    """Start a run on its target and return its record, which is in `runs`. `before`: the record that it replaces."""
    if before and before.target == job.target:
        job = replace(job, handle=before.handle)
    job = record_of(replace(job, handle=target.start_handle(job)), dollars_hour)
    with recorded(runs, job, before):  # so that `down` finds a launch that failed halfway
        job = replace(job, handle=target.up(job, say))
    write(folder(runs, job.name), job)
    return job


def find(runs: Path, name: str) -> LaunchJob | None:
    """The record of that name; None if there is none."""
    return _read(folder(runs, name).path / NAME)


def record(runs: Path, name: str) -> LaunchJob:
    """The record of that name; RecipeError if there is none."""
    if found := find(runs, name):
        return found
    if (runs / name / NAME).is_file() and (why := dict(unused(runs)).get(runs / name / NAME)):
        hint = "give its recipe file instead of its name; or `dtrain launch up RECIPE` launches it from here"
        raise RecipeError(f"{runs / name / NAME}: {why}", hint)
    known = ", ".join(job.name for job in records(runs)) or "none"
    message = f"no launch record of {name!r} in {runs}; recorded are: {known}"
    raise RecipeError(
        message, "for a run that was launched from another machine, give its recipe file instead of its name"
    )


def records(runs: Path) -> list[LaunchJob]:
    """All readable records, newest first."""
    jobs = [job for job in map(_read, runs.glob(f"*/{NAME}")) if job]
    return sorted(jobs, key=lambda job: -job.since)


def unused(runs: Path) -> list[tuple[Path, str]]:
    """Record files that are not used, and why: invalid, of a later version, or written by somebody else."""
    found = []
    for path in sorted(runs.glob(f"*/{NAME}")):
        if _read(path) is None:
            found.append((path, "cannot be read" if _values(path) is None or _is_own(path) else FOREIGN))
    return found


def forget(runs: Path, name: str) -> None:
    """Remove the record."""
    (folder(runs, name).path / NAME).unlink(missing_ok=True)


def _read(path: Path) -> LaunchJob | None:
    """The record in the file; None if it cannot be read or is not this user's. Additional keys are ignored."""
    values = _values(path)
    if values is None or not _is_own(path):
        return None
    with suppress(ValueError):
        return adapter(LaunchJob).validate_json(json.dumps(values), strict=True)
    return None


def _values(path: Path) -> JsonObject | None:
    """The content of the file; None if it is no JSON object."""
    with suppress(OSError, ValueError, RecursionError):
        values = json.loads(read_regular(path))
        return values if isinstance(values, dict) else None
    return None


def _is_own(path: Path) -> bool:
    """Whether this user wrote the record on this machine."""
    values, key = _values(path) or {}, _key()
    given = values.get(SIGNATURE)
    if not key or not isinstance(given, str) or not given.isascii():
        return False
    return hmac.compare_digest(given, _signature(values, key))
