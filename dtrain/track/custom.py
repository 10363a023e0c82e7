"""A tracker of the user's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from dtrain.core.errors import RecipeError
from dtrain.core.user_code import UserTarget, build_target, user_errors
from dtrain.track.tracker import TrackedRun, Tracker, TrackerConfig


@dataclass(frozen=True, kw_only=True)
class CustomTracker(UserTarget, TrackerConfig):
    """`target: module:name`, called with the TrackedRun and `args`. It returns an object with `log(step, values)`.

    If the object has `close()`, that is called at the end of the run. Only process 0 has trackers.
    """

    kind: Literal["custom"] = "custom"

    @contextmanager
    def open(self, about: TrackedRun) -> Iterator[Tracker]:
        """Raises RecipeError if the target cannot be imported, fails, or returns an object without `log`."""
        where = f"track.to.target: {self.target}"
        own: Any = build_target("track.to", self.target, {"run": about, **self.args}, self.folder)
        if not callable(getattr(own, "log", None)):
            raise RecipeError(f"{where} returns a {type(own).__name__} without log(step, values)")
        try:
            yield own
        finally:
            if callable(close := getattr(own, "close", None)):
                with user_errors(where):
                    close()
