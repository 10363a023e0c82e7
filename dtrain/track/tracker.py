"""What a tracker is, and the recipe's `track` section."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from dtrain.core.run_dir import Folder


@dataclass(frozen=True)
class About:
    """What a tracker is told of the run it follows."""

    folder: Folder
    name: str
    recipe: Mapping[str, Any]
    ids: dict[str, str]
    """Ids that trackers gave the run, kept in run.json, so that a resumed run stays one run."""
    start: int
    """The step from which this process goes on."""
    warn: Callable[[str], None]


class Tracker(Protocol):
    """Takes numbers. Opened on process 0 alone."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Note the values that belong to a step."""
        ...


class Sink(Protocol):
    """A frozen dataclass: one entry of the recipe's `track.to` itself."""

    def open(self, about: About) -> AbstractContextManager[Tracker]:
        """Begin to follow a run."""
        ...
