"""A run to launch, its plan and state, and the base classes of launch targets."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Le

from dtrain.core.errors import EnvironmentFault, FieldError, RecipeError
from dtrain.core.heartbeat import Heartbeat
from dtrain.core.process_info import LAUNCH
from dtrain.core.slices import Target as Slice
from dtrain.core.slices import target as slice_of
from dtrain.core.types import JsonObject, Natural, Positive, PositiveFloat
from dtrain.launch.commands import run
from dtrain.launch.names import Variable

PACKAGED = Path(__file__).parent / "templates"
CHECKOUT = Path(__file__).parents[2] / "launch"


def fill_template(name: str, values: Mapping[str, object]) -> str:
    """The template with each @WORD@ replaced. The words in the template and the keys of `values` must be the same."""
    text = ((PACKAGED if PACKAGED.is_dir() else CHECKOUT) / name).read_text()
    words = set(re.findall(r"@([A-Z_]+)@", text))
    assert words == set(values), f"{name} has the words {sorted(words)}, the values are for {sorted(values)}"
    return re.sub(r"@([A-Z_]+)@", lambda match: str(values[match.group(1)]), text)


Check = Callable[[], list[str]]
"""Returns notes for the user; raises EnvironmentFault if the launch would fail."""


def run_checks(checks: Sequence[Check]) -> list[str]:
    """Run the checks in parallel and return their notes. EnvironmentFault with every problem that they raise."""
    notes: list[str] = []
    problems: list[EnvironmentFault] = []
    with ThreadPoolExecutor(len(checks)) as pool:
        for answer in [pool.submit(check) for check in checks]:
            try:
                notes += answer.result()
            except EnvironmentFault as error:
                problems.append(error)
    if len(problems) > 1:
        lines = [f"{error.message} ({error.hint})" if error.hint else error.message for error in problems]
        raise EnvironmentFault("\n  ".join([f"{len(problems)} problems:", *lines]))
    if problems:
        raise problems[0]
    return notes


def check_variables(names: Sequence[str]) -> list[str]:
    """Check that the environment variables that are passed to the run are set on this machine."""
    if missing := [name for name in names if name not in os.environ]:
        raise EnvironmentFault(
            f"environment variables not set here: {', '.join(missing)}",
            "export them, or remove them from launch.environment",
        )
    return []


def check_image(image: str) -> list[str]:
    """Check that a container image exists, with the credentials of this machine."""
    command = ["docker", "manifest", "inspect", image]
    if "-docker.pkg.dev/" in image:
        command = ["gcloud", "artifacts", "docker", "images", "describe", image, "--format=value(image_summary.digest)"]
    try:
        run(command, wait=60)
    except EnvironmentFault as error:
        if re.search("Image not found|no such manifest|manifest unknown", error.message):
            raise EnvironmentFault(f"image {image} does not exist", "build one with launch/Dockerfile") from error
        return [f"not checked: image {image}: {error.message}"]
    return []


Say = Callable[[str], None]
VERSION = 2
"""Version of launch records; increased when a field of `LaunchJob` changes."""
CHIPS_A_HOST = 4
"""TPU chips of one host, in a slice of several hosts."""


@dataclass(frozen=True)
class LaunchJob:
    """A run to launch, or one that was launched: the content of a launch record."""

    name: str
    recipe: str
    """The complete recipe as YAML, without its launch section."""
    launch: str = ""
    """Id of this launch, the same for all its starts."""
    handle: dict[str, str] = field(default_factory=dict)
    """Returned by `up`: the number or name that identifies the run on its target."""
    target: JsonObject = field(default_factory=dict)
    """The launch section of the recipe, as plain values."""
    folder: Path | None = None
    """The run's folder on this machine, with the submitted files in `launch/`. Not recorded."""
    extras: tuple[str, ...] = ()
    """The extras of dtrain that the recipe needs on the hosts. Not recorded."""
    needs: tuple[str, ...] = ()
    """What the recipe needs there, a line each. Not recorded."""
    allow_changes: bool = False
    """Whether the run resumes from saved state although its recipe changed. Not recorded."""
    since: float = 0.0
    """Time of the launch, in seconds since 1970."""
    owner: str = ""
    """Who launched it, as user@machine."""
    dollars_hour: float | None = None
    version: Annotated[int, Le(VERSION)] = VERSION

    def environment(self) -> dict[str, str]:
        """Environment variables of every process of the run."""
        return {LAUNCH: self.launch}


@dataclass(frozen=True)
class LaunchPlan:
    """What `up` would do: the files it writes, the commands it runs, the number of machines, the price."""

    files: Mapping[str, str]
    commands: list[list[str]]
    hosts: int
    chips: int = 0
    dollars_hour: float | None = None
    """List price of all chips together; None if nothing is rented or the price is not known."""
    hours: float | None = None
    """Limit on the hours of all starts together; None without a limit."""
    rented: bool = False
    """Whether machines are paid by the hour, even if the price is not known."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MachineState:
    """Current state of one machine or resource."""

    name: str
    state: str
    """waiting, running, ended, lost, unreachable, absent, or the target's own word."""
    what: str = ""
    """Progress of the run, or the reason of a failure."""
    code: int | None = None
    """Exit code of the run; None while it has not ended."""
    seconds: float | None = None
    """Seconds for which its machines have been billed; None if not known."""
    heartbeat: Heartbeat | None = None
    """The latest heartbeat of the run's first process on the machine; None if it cannot be read from here."""


@dataclass(frozen=True, kw_only=True)
class LaunchTarget(ABC):
    """Base class of launch targets, the kinds of the recipe's `launch` section: their common settings and verbs."""

    environment: tuple[Variable, ...] = ()
    """Names of environment variables passed to the run, such as keys and tokens. Their values are not written down."""
    restarts: Natural = 3
    """Limit on consecutive restarts without a new checkpoint, whatever ended the run; then it exits with code 8."""
    processes: Positive = 1
    """Processes on each host."""
    devices: Positive | None = None
    """Number of simulated CPU devices, of all hosts together."""
    hours: PositiveFloat | None = None
    """Limit on the hours of all starts together; the run then saves and ends."""

    keeps_environment: ClassVar[bool] = False
    """Whether the run has all variables of this machine's environment."""
    files: ClassVar[Literal["shared", "own", "unknown"]] = "own"
    """Whether its hosts have this machine's files at the same paths: they share them, they have only what an image or a
    mount brings, or that is up to the user."""
    sends_environment: ClassVar[bool] = True
    """Whether the values of `environment` are taken from this machine."""

    replaces_hosts: ClassVar[bool] = False
    """Whether a host that is lost comes back, or another one, without a command of the user's."""

    @property
    def mounted(self) -> Mapping[str, str]:
        """Folders that its hosts have beside those of an image, and what each is; empty if that is not known."""
        return {}

    @abstractmethod
    def plan(self, job: LaunchJob) -> LaunchPlan:
        """What `up` would do. Changes nothing."""

    @abstractmethod
    def describe(self) -> list[str]:
        """The hosts and the program, one line each, as `up` shows them before it asks for confirmation."""

    @abstractmethod
    def up(self, job: LaunchJob, say: Say) -> dict[str, str]:
        """Start the run and return its handle. If it fails, it leaves nothing behind or raises LeftBehind."""

    @abstractmethod
    def find(self, job: LaunchJob) -> dict[str, str] | None:
        """The handle of a run of that name that was launched from another machine; None if there is none."""

    @abstractmethod
    def status(self, job: LaunchJob) -> list[MachineState]:
        """State of the run, one row for each machine or resource."""

    @abstractmethod
    def logs(self, job: LaunchJob, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        """Yield (machine, line) in order of arrival, of one host or of all."""

    @abstractmethod
    def stop(self, job: LaunchJob, say: Say) -> None:
        """Make the run save and end; return when it has ended."""

    @abstractmethod
    def down(self, job: LaunchJob, say: Say) -> None:
        """Remove everything that `up` created, except the run's folder."""

    @abstractmethod
    def removes(self, job: LaunchJob) -> list[str]:
        """What `down` removes, one line each."""

    def watch(self, job: LaunchJob) -> Iterator[list[MachineState]]:
        """The state again and again, each time that it is asked for."""
        while True:
            yield self.status(job)

    def fail(self, job: LaunchJob, host: int, *, whole: bool) -> str:
        """Kill a process of the run that trains on that host, or with `whole` all of them and what would restart them
        there. Returns its name. EnvironmentFault where only `by_hand` can."""
        raise EnvironmentFault("dtrain cannot kill processes there", "\n".join(self.by_hand(job)))

    def read(self, job: LaunchJob, name: str) -> str:
        """The text of a file of the run folder, by its path in it. EnvironmentFault if it cannot be read from here."""
        raise EnvironmentFault(f"dtrain cannot read {name} there")

    def by_hand(self, job: LaunchJob) -> list[str]:
        """Commands that end a process and a host of the run, where dtrain cannot watch how it recovers; else none."""
        return []

    def checks(self, job: LaunchJob) -> list[Check]:
        """The checks that `check` runs."""
        return [partial(check_variables, self.environment)]

    def check(self, job: LaunchJob) -> list[str]:
        """What could not be checked, one line each. EnvironmentFault with everything that `up` needs and is missing.
        Creates nothing."""
        return run_checks(self.checks(job))

    def start_handle(self, job: LaunchJob) -> dict[str, str]:
        """The handle to record before anything is created: that of an earlier launch, if it is still needed."""
        return job.handle

    def limit(self) -> float | None:
        """Limit on the hours of all starts together; None without a limit."""
        return self.hours

    def run_options(self, job: LaunchJob | None = None) -> list[str]:
        """Options of `dtrain run` on a host, after the recipe and the folder."""
        options = ["--restarts", str(self.restarts)]
        options += ["--processes", str(self.processes)] if self.processes > 1 else []
        options += ["--devices", str(self.devices)] if self.devices else []
        options += ["--hours", f"{limit:g}"] if (limit := self.limit()) else []
        options += ["--allow-changes"] if job and job.allow_changes else []
        return options


@dataclass(frozen=True, kw_only=True)
class Rented(LaunchTarget):
    """A target whose machines are paid by the hour."""

    budget: PositiveFloat | None = None
    """Limit on the dollars of all starts together, at the price that `up` shows; the run then saves and ends."""

    @property
    @abstractmethod
    def rate(self) -> float | None:
        """Highest price of all machines together, in dollars an hour; None if it is not known."""

    def limit(self) -> float | None:
        """The smaller of `hours` and the hours that `budget` pays for."""
        affordable = self.budget / self.rate if self.budget and self.rate else None
        return min((hours for hours in (self.hours, affordable) if hours), default=None)


def shape_of(on: str, slices: int = 1) -> Slice:
    """The TPU slices or GPUs of that name, as v5e-64. FieldError if the name is not valid."""
    try:
        return slice_of(on, slices)
    except RecipeError as error:
        raise FieldError("on", error.message, error.hint) from error
