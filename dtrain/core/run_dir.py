"""The run folder: where everything about one run is kept."""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.core.errors import EnvironmentFault, RecipeError, cause
from dtrain.core.mounts import on_this_host
from dtrain.core.run_json import wrong_value

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Also valid as a label and a host name on the clouds."""

MANIFEST = "MANIFEST.json"
"""Written last into the folder of a step, which counts from then on."""
INCOMPLETE = ".incomplete-"
"""Followed by a step: beside its folder while that is written or deleted."""

KINDS = (
    (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)  # fmt: skip


@dataclass(frozen=True)
class Folder:
    """`runs/NAME/`, by the names of what is in it."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The recipe as resolved, every default written out."""
        return self.path / "recipe.yaml"

    @property
    def record(self) -> Path:
        """State, reason, exit code, versions, topology, times."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """What the console showed."""
        return self.path / "log.txt"

    @property
    def plans(self) -> Path:
        """What `dtrain plan` foretold, a file for each target."""
        return self.path / "plans"

    @property
    def lease(self) -> Path:
        """Which process may write here."""
        return self.path / "lease.json"

    @property
    def stop_request(self) -> Path:
        """A file that asks the run to save and leave with exit code 0; a launched run does not start beside it."""
        return self.path / "stop"

    @property
    def usage(self) -> Path:
        """What the starts of a launch have used: time, and starts that saved nothing new."""
        return self.path / "usage.json"

    def heartbeat(self, rank: int) -> Path:
        """A process's heartbeat, which its own host reads."""
        return on_this_host(self.path) / f"beat-{rank}.json"

    @property
    def checkpoints(self) -> Path:
        """A folder for each saved step."""
        return self.path / "checkpoints"

    def prepare(self) -> None:
        """Make the folder and prove that it can be written to; EnvironmentFault where it cannot."""
        probe = self.path / f".probe-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                probe.write_text("dtrain")
            finally:
                with suppress(OSError):
                    probe.unlink(missing_ok=True)
        except OSError as error:
            hint = "choose another place with --runs-dir, or free this one"
            raise EnvironmentFault(f"cannot write to the run folder {self.path}: {cause(error)}", hint) from error
        self.refuse_other_kinds()

    def refuse_other_kinds(self) -> None:
        """EnvironmentFault where something else, such as a FIFO, has the name of one of the folder's files."""
        files = (self.recipe, self.record, self.metrics, self.log, self.lease, self.path / ".lock", self.heartbeat(0))
        files += (self.usage,)
        for path in (*files, self.checkpoints, self.plans):
            _refuse_other_kind(path, file=path in files)

    def read_record(self) -> dict[str, Any]:
        """run.json, checked; empty where there is none. EnvironmentFault where it is damaged."""
        hint = f"move {self.record.name} away: the run resumes from its newest checkpoint, its times are counted anew"
        try:
            found = read_json(self.record)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"{self.record} cannot be read: {cause(error)}", hint) from error
        if not isinstance(found, dict) or not found.keys() >= {"state", "step"}:
            raise EnvironmentFault(f"{self.record} holds no record of a run", hint)
        if problem := wrong_value(found):
            raise EnvironmentFault(f"{self.record}: {problem}", hint)
        if found.pop("sha256", None) not in (None, _digest(found)):
            raise EnvironmentFault(f"{self.record} was changed after it was written", hint)
        return found

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace run.json."""
        overwrite(self.record, json.dumps(record | {"sha256": _digest(record)}, indent=2) + "\n")


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def _refuse_other_kind(path: Path, *, file: bool) -> None:
    """EnvironmentFault where something stands under that name that a run cannot use as its file, or folder."""
    hint = "move it away, or give this run another name: name=..."
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise EnvironmentFault(f"{path} is a link to {path.readlink()}, which does not exist", hint) from None
        return
    except OSError as error:
        raise EnvironmentFault(cause(error), hint) from error
    if not (stat.S_ISREG(mode) if file else stat.S_ISDIR(mode)):
        raise EnvironmentFault(f"{path} is {_kind(mode)}; a run needs a {'file' if file else 'folder'} there", hint)


def _kind(mode: int) -> str:
    return next((name for is_kind, name in KINDS if is_kind(mode)), "a file")


def read_regular(path: Path) -> bytes:
    """The bytes of a file; OSError where it is anything else, such as a FIFO, which would block."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.ENXIO, f"{_kind(mode)}, not a file", str(path))
    except BaseException:
        os.close(handle)
        raise
    with os.fdopen(handle, "rb") as file:
        return file.read()


def read_json(path: Path) -> Any:
    """The value in a JSON file; ValueError where it is none, OSError where it is no file that can be read."""
    try:
        return json.loads(read_regular(path))
    except RecursionError:
        raise ValueError("nested too deep") from None


def overwrite(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it."""
    part = path.with_suffix(f"{path.suffix}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)  # a full disk would stay full
        raise


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps that a folder of checkpoints holds, the newest first; whether they are sound is another question.

    One that is being written or deleted, or was when its process died, is none.
    """
    found = checkpoints.iterdir() if checkpoints.is_dir() else ()
    steps = (int(path.name) for path in found if is_step(path.name) and path.is_dir())
    return sorted((step for step in steps if _counts(checkpoints, step)), reverse=True)


def marker(checkpoints: Path, step: int) -> Path:
    """The file that is there while the folder of that step is written or deleted."""
    return checkpoints / f"{INCOMPLETE}{step}"


def _counts(checkpoints: Path, step: int) -> bool:
    """In this order: a save writes the manifest, then removes the marker."""
    return (checkpoints / str(step) / MANIFEST).exists() or not marker(checkpoints, step).exists()


def is_step(name: str) -> bool:
    """Whether a checkpoint's folder can have this name: digits without leading zeros."""
    return name.isascii() and name.isdecimal() and (name == "0" or name[0] != "0")


def folder(runs: Path, name: str) -> Folder:
    """The folder of the run of that name; RecipeError where the name could escape `runs`, EnvironmentFault
    where `runs` is an address."""
    if runs.parts and runs.parts[0].endswith(":"):
        scheme = runs.parts[0]
        raise EnvironmentFault(f"runs are kept in a folder; {scheme}// is none", "mount the bucket, as with gcsfuse")
    if not NAME.fullmatch(name):
        raise RecipeError(
            f"{name!r} is no run name: use a to z, 0 to 9 and '-' inside, 63 characters at most",
            "set it with name=my-run",
        )
    return Folder(runs / name)
