"""usage.json: the time that the starts of a launch have used, and how many of them saved no new checkpoint.

Only process 0 writes it. The key is the id of the launch; runs that were not launched share the empty id, under which
time is added up but starts are not counted. A write drops the entries of other launches.
"""

import json
from dataclasses import asdict, dataclass, replace

from dtrain.core.errors import EnvironmentFault, cause
from dtrain.core.files import overwrite, read_json
from dtrain.core.run_dir import Folder
from dtrain.core.run_json import LARGEST
from dtrain.core.types import JsonObject


@dataclass(frozen=True)
class Usage:
    """The usage of the starts of one launch so far."""

    starts: int = 0
    wasted: int = 0
    """Consecutive starts before the latest one that committed no new checkpoint."""
    newest: int = -1
    """The newest committed step when the latest start began; -1 for none."""
    seconds: float = 0.0
    """Wall time of all starts; the time between them does not count."""

    def next_start(self, committed: int) -> "Usage":
        """The usage after one more start, whose newest committed step is `committed`."""
        if not self.starts or committed > self.newest:
            return replace(self, starts=self.starts + 1, wasted=0, newest=committed)
        # a damaged checkpoint may have been renamed meanwhile: then checkpoints above the lower step are new
        return replace(self, starts=self.starts + 1, wasted=self.wasted + 1, newest=min(self.newest, committed))


def read_usage(folder: Folder, launch: str) -> Usage:
    """The usage of that launch; zero if no start of it is recorded. EnvironmentFault if the file is damaged."""
    values = _read(folder).get(launch)
    return Usage(**values) if values else Usage()


def write_usage(folder: Folder, launch: str, usage: Usage) -> None:
    """Replace the entry of that launch. OSError if the file cannot be written."""
    unlaunched = {"": values} if launch and (values := _read(folder).get("")) else {}
    overwrite(folder.usage, json.dumps(unlaunched | {launch: asdict(usage)}) + "\n")


def _read(folder: Folder) -> dict[str, JsonObject]:
    hint = f"move {folder.usage} away: time and starts are then counted from 0"
    try:
        values = read_json(folder.usage)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{folder.usage} cannot be read: {cause(error)}", hint) from error
    if not isinstance(values, dict) or not all(map(_is_usage, values.values())):
        raise EnvironmentFault(f"{folder.usage} is damaged: it does not have the expected fields", hint)
    return values


def _is_usage(values: object) -> bool:
    types = {name: float if name == "seconds" else int for name in asdict(Usage())}
    if not isinstance(values, dict) or values.keys() != types.keys():
        return False
    return all(
        isinstance(value, int | types[name]) and not isinstance(value, bool) and abs(value) < LARGEST
        for name, value in values.items()
    )
