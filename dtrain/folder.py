"""The run folder: where everything about one run is kept."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.errors import EnvironmentFault, RecipeError

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Also valid as a label and a host name on the clouds."""


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

    def beat(self, rank: int) -> Path:
        """A process's sign of life."""
        return self.path / f"beat-{rank}.json"

    @property
    def checkpoints(self) -> Path:
        """A folder for each saved step."""
        return self.path / "checkpoints"

    def prepare(self) -> None:
        """Make the folder and prove that it can be written to; EnvironmentFault where it cannot."""
        probe = self.path / f".probe-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.write_text("dtrain")
            probe.unlink()
        except OSError as error:
            hint = "choose another place with --runs-dir, or free this one"
            raise EnvironmentFault(f"cannot write to the run folder {self.path}: {error.strerror}", hint) from error

    def read_record(self) -> dict[str, Any]:
        """run.json as it stands; empty where there is none."""
        try:
            found = json.loads(self.record.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"{self.record} cannot be read: {error}", "remove it to go on") from error
        if not isinstance(found, dict):
            raise EnvironmentFault(f"{self.record} holds no record of a run", "remove it to go on")
        return found

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace run.json."""
        overwrite(self.record, json.dumps(record, indent=2) + "\n")


def overwrite(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it."""
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_text(text)
    part.replace(path)


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps that a folder of checkpoints holds, the newest first; whether they are sound is another question."""
    found = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return sorted((int(path.name) for path in found if path.name.isdecimal() and path.is_dir()), reverse=True)


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
