"""usage.json: what the starts of one launch have used, of time and of starts that saved nothing new.

The first process alone writes it. A launch is known by its id; the time of what a person started is added up under the
empty id, where starts are not counted. Entries of other launches are dropped.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from dtrain.core.errors import EnvironmentFault, cause
from dtrain.core.run_dir import Folder, overwrite, read_json
from dtrain.core.run_json import LARGEST


@dataclass(frozen=True)
class Usage:
    """What the starts of one launch have used so far."""

    starts: int = 0
    wasted: int = 0
    """Starts in a row, before the newest one, that committed no new checkpoint."""
    newest: int = -1
    """The newest committed step when the newest start began; -1 for none."""
    seconds: float = 0.0
    """Wall time of all starts; the time between them does not count."""

    def next_start(self, committed: int) -> "Usage":
        """With one more start, which finds that step as the newest committed one."""
        if not self.starts or committed > self.newest:
            return replace(self, starts=self.starts + 1, wasted=0, newest=committed)
        # a damaged checkpoint may have been set aside meanwhile: what is saved after it is new
        return replace(self, starts=self.starts + 1, wasted=self.wasted + 1, newest=min(self.newest, committed))


def read_usage(folder: Folder, launch: str) -> Usage:
    """What that launch has used; nothing where no start of it was noted. EnvironmentFault where the file is damaged."""
    values = _read(folder).get(launch)
    return Usage(**values) if values else Usage()


def write_usage(folder: Folder, launch: str, usage: Usage) -> None:
    """Replace the entry of that launch. OSError where the file cannot be written."""
    kept = {"": values} if launch and (values := _read(folder).get("")) else {}
    overwrite(folder.usage, json.dumps(kept | {launch: asdict(usage)}) + "\n")


def _read(folder: Folder) -> dict[str, dict[str, Any]]:
    hint = f"move {folder.usage} away: time and starts are then counted from zero"
    try:
        values = read_json(folder.usage)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{folder.usage} cannot be read: {cause(error)}", hint) from error
    if not isinstance(values, dict) or not all(map(_is_usage, values.values())):
        raise EnvironmentFault(f"{folder.usage} is damaged", hint)
    return values


def _is_usage(values: Any) -> bool:
    kinds = {name: float if name == "seconds" else int for name in asdict(Usage())}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        return False
    return all(
        isinstance(value, int | kinds[name]) and not isinstance(value, bool) and abs(value) < LARGEST
        for name, value in values.items()
    )
