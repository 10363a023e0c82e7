"""The run folder, which holds all files of one run."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.core.errors import EnvironmentFault, RecipeError, cause, way_out
from dtrain.core.files import read_json, refuse_other_kind, update
from dtrain.core.types import JsonObject

LARGEST = 1e300
STATES = {"running", "finished", "stopped", "failed", "aborted"}


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _table(value: object, valid: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(valid, value.values()))


def _data(value: object) -> bool:
    return (
        isinstance(value, dict)
        and all(_natural(value.get(name)) for name in ("train", "test"))
        and _number(value.get("epochs"))
    )


def _skip(value: object) -> bool:
    return isinstance(value, dict) and all(_natural(value.get(name)) for name in ("step", "batches_skipped"))


FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "state": (f"one of {', '.join(sorted(STATES))}", lambda value: isinstance(value, str) and value in STATES),
    **dict.fromkeys(("name", "reason", "git", "stopped_by"), ("text", lambda value: isinstance(value, str))),
    **dict.fromkeys(("step", "steps", "starts", "rollbacks", "next_batch"), ("a whole number", _natural)),
    **dict.fromkeys(("started", "written", "step_s_saved", "step_s_kept"), ("a number", _number)),
    "ended": ("a number", lambda value: value is None or _number(value)),
    "exit_code": ("a whole number", lambda value: value is None or _natural(value)),
    **dict.fromkeys(("lost", "seconds"), ("an object with numbers", lambda value: _table(value, _number))),
    **dict.fromkeys(
        ("versions", "tracker_ids", "units"),
        ("an object with texts", lambda value: _table(value, lambda text: isinstance(text, str))),
    ),
    **dict.fromkeys(
        ("higher_is_better", "rising"),
        ("an object with true or false", lambda value: _table(value, lambda up: isinstance(up, bool))),
    ),
    "changes": ("a list of objects", lambda value: isinstance(value, list) and all(isinstance(x, dict) for x in value)),
    "skips": (
        "a list of objects with steps and batches",
        lambda value: isinstance(value, list) and all(map(_skip, value)),
    ),
    "data": (
        "an object with numbers of train and test examples and epochs",
        lambda value: value is None or _data(value),
    ),
    "topology": ("an object", lambda value: isinstance(value, dict)),
}
"""Per key of run.json: a description of its values for messages, and a function that checks a value."""


RECOMPUTED = "recomputed_s"
"""The key of `lost` for seconds of steps that were computed again."""
STEP_PARTS = ("dispatch", "device", "host", "step")
"""The keys of `seconds` that make up the time of steps, without waiting for data; "step" is the whole in records of
versions before 0.3."""
REQUESTED = "stop requested"
"""What stopped a run on a request of `launch stop`, or at its time limit."""
STOPPED_BY_USER = ("SIGINT", REQUESTED)
"""Values of `stopped_by` after which a run waits for its user."""


def step_seconds(seconds: Mapping[str, float]) -> float:
    """Seconds spent in steps."""
    return sum(seconds.get(part, 0.0) for part in STEP_PARTS)


RENAMED = {"went_back": "rollbacks", "rising": "higher_is_better", "step_s_kept": "step_s_saved"}
"""Keys of records of earlier versions, and their names now."""


def renamed(record: JsonObject) -> JsonObject:
    """The record with the keys of this version: earlier ones wrote others, and keys of `lost` with blanks."""
    if RENAMED.keys() & record.keys():
        record = {RENAMED.get(key, key): value for key, value in record.items()}
    if any(" " in key for key in record.get("lost", {})):
        lost = {_lost_key(key): seconds for key, seconds in record["lost"].items()}
        record = record | {"lost": lost}
    return record


def _lost_key(key: str) -> str:
    return {"done again": RECOMPUTED}.get(key, f"{key.replace(', ', '_')}_s" if " " in key else key)


def wrong_value(record: Mapping[str, object]) -> str:
    """Describe the first value in a run record with the wrong type; empty if all are valid."""
    for key, (expected, valid) in FIELDS.items():
        if key in record and not valid(record[key]):
            return f"{key} is {record[key]!r:.80}, not {expected}"
    return ""


MOUNTS = Path("/proc/self/mountinfo")


def is_fuse(path: Path) -> bool:
    """Whether the path, or its nearest existing parent folder, is on a FUSE file system; False if that is unknown."""
    try:
        device = _existing(path).stat().st_dev
        mounts = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = (line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number)
    return any(kind == "fuse" or kind.startswith("fuse.") for kind in kinds)


def on_this_host(folder: Path) -> Path:
    """The folder for files about `folder` that only this host reads; the same for every process of a user.

    It is `folder` itself, or a folder in the user's cache if `folder` is on FUSE and the cache is writable.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home folder
        return folder
    if not is_fuse(folder) or not os.access(_existing(cache), os.W_OK):
        return folder
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    return cache / "dtrain" / "heartbeats" / name


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    return next((candidate for candidate in (path, *path.parents) if candidate.exists()), path)


NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Run names; such a name is also valid as a label and a host name in the clouds."""

MANIFEST = "MANIFEST.json"
"""File that is written last into the folder of a step: it marks a complete checkpoint."""
INCOMPLETE = ".incomplete-"
"""Prefix of the marker file `.incomplete-STEP`, which exists while the folder STEP is written or deleted."""


@dataclass(frozen=True)
class Folder:
    """The run folder `runs/NAME/` and the paths of its files."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe, with every default written out."""
        return self.path / "recipe.yaml"

    @property
    def record(self) -> Path:
        """The run record: state, reason, exit code, versions, topology, times."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """The metrics, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """A copy of the console output."""
        return self.path / "log.txt"

    @property
    def plans(self) -> Path:
        """Predictions of `dtrain plan`, one file per target."""
        return self.path / "plans"

    @property
    def samples(self) -> Path:
        """What the model drew at evaluations: 00000500-NAME.png."""
        return self.path / "samples"

    @property
    def evaluation(self) -> Path:
        """The newest result of `dtrain evaluate` on this run's own data."""
        return self.path / "evaluation.json"

    @property
    def lease(self) -> Path:
        """The lease file, which identifies the process that may write to this folder."""
        return self.path / "lease.json"

    @property
    def stop_request(self) -> Path:
        """The stop request: if this file exists, the run saves and exits with code 0, and a launched run does not
        start."""
        return self.path / "stop"

    @property
    def profile(self) -> Path:
        """Traces of the profiler, and their summary."""
        return self.path / "profile"

    @property
    def profile_request(self) -> Path:
        """A request to profile the next steps of a run that trains."""
        return self.path / "profile-request"

    @property
    def usage(self) -> Path:
        """The usage of a launch: its time, and its starts without a new checkpoint."""
        return self.path / "usage.json"

    def heartbeat(self, rank: int) -> Path:
        """The heartbeat file of a process, on a file system local to its host where possible."""
        return on_this_host(self.path) / f"beat-{rank}.json"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, one folder per saved step."""
        return self.path / "checkpoints"

    def prepare(self) -> None:
        """Create the folder and check that it is writable; EnvironmentFault if it is not."""
        probe = self.path / f".probe-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                probe.write_text("dtrain")
            finally:
                with suppress(OSError):
                    probe.unlink(missing_ok=True)
        except OSError as error:
            hint = "choose another folder with --runs-dir, or make this one writable"
            raise EnvironmentFault(f"cannot write to the run folder {self.path}: {cause(error)}", hint) from error
        self.refuse_other_kinds()

    def refuse_other_kinds(self) -> None:
        """EnvironmentFault if another kind of file, such as a FIFO, has the name of one of the folder's files."""
        files = (self.recipe, self.record, self.metrics, self.log, self.lease, self.path / ".lock", self.heartbeat(0))
        files += (self.usage,)
        for path in (*files, self.checkpoints, self.plans):
            refuse_other_kind(path, file=path in files)

    def read_record(self) -> JsonObject:
        """Read and check run.json; empty if there is none. EnvironmentFault if it is damaged."""
        hint = f"move {self.record.name} away: the run resumes from its newest checkpoint and its times start from 0"
        try:
            record = read_json(self.record)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"{self.record} cannot be read: {cause(error)}", hint) from error
        if not isinstance(record, dict) or not record.keys() >= {"state", "step"}:
            raise EnvironmentFault(f"{self.record} is not the record of a run: it lacks `state` or `step`", hint)
        if problem := wrong_value(record):
            raise EnvironmentFault(f"{self.record}: {problem}", hint)
        if record.pop("sha256", None) not in (None, _digest(record)):
            raise EnvironmentFault(f"{self.record} was changed after dtrain wrote it: its checksum differs", hint)
        return renamed(record)

    def write_record(self, record: dict[str, object]) -> None:
        """Replace run.json atomically and add a checksum. EnvironmentFault if it cannot be written."""
        try:
            update(self.record, json.dumps(record | {"sha256": _digest(record)}, indent=2) + "\n")
        except OSError as error:
            raise EnvironmentFault(f"cannot write {self.record}: {cause(error)}", way_out(error)) from error


def _digest(record: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps with a committed checkpoint, newest first; their content is not verified.

    A checkpoint whose writing or deletion is in progress, or was interrupted, is left out.
    """
    entries = checkpoints.iterdir() if checkpoints.is_dir() else ()
    steps = (int(path.name) for path in entries if is_step(path.name) and path.is_dir())
    return sorted((step for step in steps if _is_committed(checkpoints, step)), reverse=True)


def newest_step(run_dir: "Folder", record: JsonObject) -> int:
    """The newest step that a restart resumes from: a run writes its record when the next one is saved, or when it
    ends."""
    return max(record.get("step") or 0, *saved_steps(run_dir.checkpoints)[:1], 0)


def marker(checkpoints: Path, step: int) -> Path:
    """The marker file that exists while the folder of that step is written or deleted."""
    return checkpoints / f"{INCOMPLETE}{step}"


def _is_committed(checkpoints: Path, step: int) -> bool:
    # check in this order: a save writes the manifest first and then removes the marker
    return (checkpoints / str(step) / MANIFEST).exists() or not marker(checkpoints, step).exists()


def is_step(name: str) -> bool:
    """Whether this is a valid name of a checkpoint folder: ASCII digits without leading zeros."""
    return name.isascii() and name.isdecimal() and (name == "0" or name[0] != "0")


def folder(runs: Path, name: str) -> Folder:
    """The folder of the run with that name; RecipeError if the name is invalid, EnvironmentFault if `runs` is a URL."""
    if runs.parts and runs.parts[0].endswith(":"):
        message = f"the runs folder must be a local path, not a URL ({runs.parts[0]}//)"
        raise EnvironmentFault(message, "mount the bucket, for example with gcsfuse")
    if not NAME.fullmatch(name):
        allowed = "use a to z, 0 to 9 and '-' (not as the first or last character), 63 characters at most"
        raise RecipeError(f"{name!r} is not a valid run name: {allowed}", "set it with name=my-run")
    return Folder(runs / name)
