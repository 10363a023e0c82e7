"""The interface of trackers, which send metrics to other programs."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for its trackers."""

    folder: Folder
    name: str
    recipe: JsonObject
    ids: dict[str, str]
    """Ids of the run in external trackers, stored in run.json so that a resumed run keeps its id; a tracker may add
    one."""
    start: int
    """The step from which this start resumes; 0 for a new run."""
    warn: Callable[[str], None]


class Tracker(Protocol):
    """Records metrics. Opened only on process 0."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step."""
        ...


class Sink(Protocol):
    """One entry of the recipe's `track.to`, a frozen dataclass."""

    def open(self, about: TrackedRun) -> AbstractContextManager[Tracker]:
        """Start to track a run; the tracker is valid within the context."""
        ...
