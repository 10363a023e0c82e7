"""What is launched: one small value that every target renders, and what every target answers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dtrain.fields import Natural, Positive
from dtrain.launch.names import Variable

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A run that is to be launched."""

    name: str
    recipe: str
    """The recipe as YAML, whole."""
    handle: Mapping[str, str] = field(default_factory=dict)
    """What `up` gave back when it was launched: a number, a name."""
    section: Mapping[str, Any] = field(default_factory=dict)
    """The target, as plain values."""


@dataclass(frozen=True)
class Plan:
    """What `up` would do: what it writes, what it runs, on how many machines, at what price."""

    files: Mapping[str, str]
    commands: list[list[str]]
    hosts: int
    chips: int = 0
    dollars_hour: float | None = None
    """None where nothing is rented."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One machine, or one resource, as it is now."""

    name: str
    state: str
    """waiting, running, ended, lost, or the target's own word."""
    what: str = ""
    """Where the run is, or what went wrong."""
    code: int | None = None
    """How the run ended there."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every target can be told."""

    environment: tuple[Variable, ...] = ()
    """Variables, by name, that the run gets as they are here: keys, tokens. Their values are written nowhere."""
    restarts: Natural = 3
    """How often a host may start the run again without a new checkpoint; preemptions do not count."""
    processes: Positive = 1
    """On each host."""
    devices: Positive | None = None
    """Pretend so many on the hosts' CPUs, all hosts together."""

    def begins(self, job: Job) -> dict[str, str]:
        """What a launch is known by before anything is made: of an earlier one, where it lives on."""
        return dict(job.handle)

    def run_options(self) -> list[str]:
        """The command line of `dtrain run` on a host, after the recipe and the folder."""
        options = ["--restarts", str(self.restarts)]
        options += ["--processes", str(self.processes)] if self.processes > 1 else []
        options += ["--devices", str(self.devices)] if self.devices else []
        return options


class Target(Protocol):
    """Where a run is launched: one member of the recipe's `launch` section, a frozen dataclass."""

    @property
    def kind(self) -> str: ...

    def plan(self, job: Job) -> Plan:
        """What `up` would do. Touches nothing."""
        ...

    def begins(self, job: Job) -> dict[str, str]:
        """What a launch is known by before anything is made."""
        ...

    def up(self, job: Job, say: Say) -> dict[str, str]:
        """Bring up what is needed and start the run; what it is called there. Leaves nothing behind where it fails."""
        ...

    def status(self, job: Job) -> list[Row]:
        """How it stands."""
        ...

    def logs(self, job: Job, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        """(machine, line) as they are said; of one host, or all."""
        ...

    def stop(self, job: Job, say: Say) -> None:
        """Have the run save and leave; what was brought up stays."""
        ...

    def down(self, job: Job, say: Say) -> None:
        """Take down all that `up` brought; the run's folder stays."""
        ...

    def removes(self, job: Job) -> list[str]:
        """What `down` takes away, in words."""
        ...
