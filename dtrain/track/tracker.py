"""The interface of trackers, which send metrics to other programs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from dtrain.core.metrics import Metric
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject

Sample = Mapping[str, str]
"""A question with its expected and its given answer: `prompt`, `answer` and `given`."""


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
    metrics: tuple[Metric, ...] = ()
    """The metrics that the model declares."""
    git: str = ""
    """The git commit of the working folder, with "-dirty" if files are changed; empty outside of a repository."""


class Tracker(Protocol):
    """Records metrics. Opened only on process 0."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step."""
        ...

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Record answers of the model. A user's own tracker may lack this method."""
        ...

    def pictures(self, step: int, grids: Mapping[str, Any]) -> None:
        """Record pictures that the model drew, by name, side by side: uint8 (height, width, 3). A user's own tracker
        may lack this method."""
        ...


@dataclass
class SafeTracker:
    """A tracker whose errors end the tracking and not the run: they are reported once."""

    tracker: Any
    """A `Tracker`; None if it did not start."""
    name: str
    warn: Callable[[str], None]
    failed: bool = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call(step, lambda: self.tracker.log(step, values))

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        if callable(record := getattr(self.tracker, "samples", None)):
            self._call(step, lambda: record(step, rows))

    def pictures(self, step: int, grids: Mapping[str, Any]) -> None:
        if callable(record := getattr(self.tracker, "pictures", None)):
            self._call(step, lambda: record(step, grids))

    def _call(self, step: int, record: Callable[[], object]) -> None:
        if self.failed:
            return
        try:
            record()
        except Exception as error:
            self.failed = True
            self.warn(f"track.to: {self.name} failed at step {step} and gets no more metrics: {_first(error)}")


def _first(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def opened(config: "TrackerConfig", about: TrackedRun) -> Iterator[Tracker]:
    """Open a tracker whose errors, after it was opened, do not end the run; not even errors while it is closed."""
    name = config.name
    with ExitStack() as stack:
        try:
            tracker = SafeTracker(stack.enter_context(config.open(about)), name, about.warn)
        except (Exception, SystemExit) as error:
            if not about.start:
                raise
            about.warn(f"track.to: {name} did not start, and the resumed run continues without it: {_first(error)}")
            tracker = SafeTracker(None, name, about.warn, failed=True)
        ended: BaseException | None = None
        try:
            yield tracker
        except BaseException as error:
            ended = error
            raise
        finally:
            try:
                stack.pop_all().__exit__(type(ended) if ended else None, ended, ended.__traceback__ if ended else None)
            except Exception as error:
                if error is not ended:
                    about.warn(f"track.to: {name} failed while it was closed: {error}")


class TrackerConfig(ABC):
    """One entry of the recipe's `track.to`: subclasses are frozen dataclasses."""

    kind: Any
    """Its name in recipes."""
    remote: ClassVar[bool] = True
    """Whether it may send the metrics to another machine: `bench` leaves such trackers out."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.user_code or self.kind

    @property
    def user_code(self) -> str:
        """What the recipe names as code that runs when it is opened; empty for dtrain's own trackers."""
        return ""

    @property
    def packages(self) -> tuple[str, ...]:
        """The optional packages that it imports; see `core.extras`."""
        return ()

    @property
    def secrets(self) -> tuple[str, ...]:
        """The environment variables that it needs, on machines where nobody has logged in to its service."""
        return ()

    def check(self) -> None:  # noqa: B027 (nothing to check, by default)
        """Raises EnvironmentFault if it surely cannot start here; called before a run compiles."""

    @abstractmethod
    def open(self, about: TrackedRun) -> AbstractContextManager[Tracker]:
        """Start to track a run; the tracker is valid within the context."""
