"""What is launched: one small value that every target renders; what every target answers; what is paid by the hour."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Le

from dtrain.core.errors import FieldError, RecipeError
from dtrain.core.process_info import LAUNCH
from dtrain.core.slices import Target as Slice
from dtrain.core.slices import target as slice_of
from dtrain.core.types import Natural, Positive, PositiveFloat
from dtrain.launch.checks import Check, check_variables, run_checks
from dtrain.launch.names import Variable

Say = Callable[[str], None]
VERSION = 2
"""Of launch records; goes up where a field of `Job` changes."""
CHIPS_A_HOST = 4
"""TPU chips of one host of a slice of several."""


@dataclass(frozen=True)
class LaunchJob:
    """A run that is to be launched, or was: what a launch record holds."""

    name: str
    recipe: str
    """The recipe as YAML, whole, without its launch section."""
    launch: str = ""
    """An id of this launch, the same for all its starts."""
    handle: dict[str, str] = field(default_factory=dict)
    """What `up` returned when it was launched: the number or name that the target knows it by."""
    target: dict[str, Any] = field(default_factory=dict)
    """The launch section, as plain values."""
    folder: Path | None = None
    """The run's folder on this machine; what is submitted stays in `launch/` there. Not recorded."""
    since: float = 0.0
    """When it was launched, in seconds since 1970."""
    owner: str = ""
    """Who launched it: user@machine."""
    dollars_hour: float | None = None
    version: Annotated[int, Le(VERSION)] = VERSION

    def environment(self) -> dict[str, str]:
        """What every process of the run gets."""
        return {LAUNCH: self.launch}


@dataclass(frozen=True)
class LaunchPlan:
    """What `up` would do: what it writes, what it runs, on how many machines, at what price."""

    files: Mapping[str, str]
    commands: list[list[str]]
    hosts: int
    chips: int = 0
    dollars_hour: float | None = None
    """By list prices, all chips together; None where nothing is rented."""
    hours: float | None = None
    """The longest that all starts together may take."""
    rented: bool = False
    """Paid by the hour, whether or not the price is known."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One machine, or one resource, as it is now."""

    name: str
    state: str
    """waiting, running, ended, lost, unreachable, absent, or the target's own word."""
    what: str = ""
    """Where the run is, or what went wrong."""
    code: int | None = None
    """How the run ended there; None while it has not."""
    seconds: float | None = None
    """How long its machines have been paid for, where that is known."""


@dataclass(frozen=True, kw_only=True)
class LaunchTarget(ABC):
    """Where a run is launched: a member of the recipe's `launch` section; here the settings and verbs of every one."""

    environment: tuple[Variable, ...] = ()
    """Variables, by name, that the run gets as they are here: keys, tokens. Their values are written nowhere."""
    restarts: Natural = 3
    """How often in a row the run may be started again without a new checkpoint, whatever ended it before; then 8."""
    processes: Positive = 1
    """On each host."""
    devices: Positive | None = None
    """Fake so many devices on the hosts' CPUs, all hosts together."""
    hours: PositiveFloat | None = None
    """How long all starts together may take; the run saves and ends then."""

    sends_environment: ClassVar[bool] = True
    """Whether the values of `environment` are those of this machine."""

    @abstractmethod
    def plan(self, job: LaunchJob) -> LaunchPlan:
        """What `up` would do. Touches nothing."""

    @abstractmethod
    def describe(self) -> list[str]:
        """The hosts and the program, a line each, as `up` shows them before it asks."""

    @abstractmethod
    def up(self, job: LaunchJob, say: Say) -> dict[str, str]:
        """Start the run; its handle. Leaves nothing behind where it fails."""

    @abstractmethod
    def find(self, job: LaunchJob) -> dict[str, str] | None:
        """The handle of a run of that name that was launched from another machine; None where there is none."""

    @abstractmethod
    def status(self, job: LaunchJob) -> list[Row]:
        """How it stands."""

    @abstractmethod
    def logs(self, job: LaunchJob, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        """(machine, line) in order of arrival; of one host, or all."""

    @abstractmethod
    def stop(self, job: LaunchJob, say: Say) -> None:
        """Have the run save and end; returns when it has."""

    @abstractmethod
    def down(self, job: LaunchJob, say: Say) -> None:
        """Remove all that `up` made; the run's folder stays."""

    @abstractmethod
    def removes(self, job: LaunchJob) -> list[str]:
        """What `down` removes, a line each."""

    def checks(self, job: LaunchJob) -> list[Check]:
        """What `check` runs."""
        return [partial(check_variables, self.environment)]

    def check(self, job: LaunchJob) -> list[str]:
        """What could not be checked, a line each. EnvironmentFault with all that `up` needs and is missing. Makes
        nothing."""
        return run_checks(self.checks(job))

    def start_handle(self, job: LaunchJob) -> dict[str, str]:
        """The handle before anything is made: that of an earlier launch, where it is still needed."""
        return job.handle

    def limit(self) -> float | None:
        """The hours that all starts together may take."""
        return self.hours

    def run_options(self) -> list[str]:
        """The command line of `dtrain run` on a host, after the recipe and the folder."""
        options = ["--restarts", str(self.restarts)]
        options += ["--processes", str(self.processes)] if self.processes > 1 else []
        options += ["--devices", str(self.devices)] if self.devices else []
        options += ["--hours", f"{limit:g}"] if (limit := self.limit()) else []
        return options


@dataclass(frozen=True, kw_only=True)
class Rented(LaunchTarget):
    """A target whose machines are paid by the hour."""

    budget: PositiveFloat | None = None
    """Dollars that all starts together may cost, at the price that `up` shows; the run saves and ends then."""

    @property
    @abstractmethod
    def rate(self) -> float | None:
        """Dollars an hour at most, all machines together; None where that is not known."""

    def limit(self) -> float | None:
        """The hours that `hours` and `budget` allow."""
        bought = self.budget / self.rate if self.budget and self.rate else None
        return min((hours for hours in (self.hours, bought) if hours), default=None)


def shape_of(on: str, slices: int = 1) -> Slice:
    """The slices, or the GPUs, of that name. FieldError where there are none."""
    try:
        return slice_of(on, slices)
    except RecipeError as error:
        raise FieldError("on", error.message, error.hint) from error
