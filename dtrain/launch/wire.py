"""What the machine where `dtrain launch` is typed and the hosts send each other, and what a host writes down: frozen
dataclasses, the same at both ends, each one line of JSON:

    {"version": 1, "dtrain": "0.1.0", "type": "Reply", "value": {"problem": "...", ...}}
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from dtrain import __version__
from dtrain.core.errors import EnvironmentFault
from dtrain.core.process_info import ProcessInfo

VERSION = 1
"""Goes up where a class below changes, or what a verb does."""
RUNS_HERE = "runs here already"
Verb = Literal["look", "marks", "start", "status", "logs", "stop", "kill"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HostJob:
    """One host's part of a run; `arguments` are those of `dtrain run` after the recipe and the folder."""

    name: str
    folder: str
    runs: str
    arguments: tuple[str, ...] = ()
    rank: int = 0
    world_size: int = 1
    coordinator: str = ""
    """host:port, where the processes meet; empty where there is one host."""

    def environment(self) -> dict[str, str]:
        """The variables that give `dtrain run` its rank."""
        process = ProcessInfo(self.rank, self.world_size, self.coordinator)
        return process.environment() if self.coordinator else {}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a host is asked."""

    verb: Verb
    job: HostJob
    recipe: str = ""
    record: str = ""
    """The launch record, to be kept beside the run."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For the run; has the values of secrets, and so is never shown or written."""
    ready: str = ""
    """A file that exists where the host is set up; empty where none is waited for."""
    token: str = ""
    """In the names of the marks that show whether the hosts share one folder."""
    offset: int | None = None
    """Of the log, in bytes; None: from the last start on."""
    follow: bool = False


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a host answers; the verb decides what is set beside `problem`, for what could not be done."""

    problem: str = ""
    time: float = 0.0
    """Seconds since 1970, by the host's clock."""
    ready: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """What stands in the way of a start."""
    items: tuple[int, ...] = ()
    """Ranks whose marks are removed, or processes that are started, asked to stop, or killed."""
    alive: bool = False
    code: int | None = None
    """How the run ended on the host; None while it has not."""
    state: str = ""
    """Of run.json."""
    recorded: bool = False
    """Whether the launch record is beside the run."""
    text: str | None = None
    """Where the run is, or a line of the log; None at the log's end."""
    offset: int | None = None
    """Of the line after it."""


@dataclass(frozen=True)
class ProcessFile:
    """runner.json and run.json of a host: a process, its start time, which tells it from a later one with its number,
    where its log begins, and the exit code that it ended with for good."""

    pid: int
    start_time: str | None
    log_offset: int = 0
    code: int | None = None


def encode(message: Any) -> str:
    """One line, without its end."""
    value = {"version": VERSION, "dtrain": __version__, "type": type(message).__name__, "value": asdict(message)}
    return json.dumps(value)


def decode(text: str, kind: type[T]) -> T:
    """The message. ValueError where the text is none, EnvironmentFault where it is one of another version."""
    found = json.loads(text)
    if not isinstance(found, dict) or not found.keys() >= {"version", "dtrain", "type", "value"}:
        raise ValueError("no message of dtrain")
    problem = f"{found['type']} of version {found['version']}, not {kind.__name__} of version {VERSION}"
    if (found["type"], found["version"]) == (kind.__name__, VERSION):
        try:
            message = adapter(kind).validate_json(json.dumps(found["value"]), strict=True)
            if json.loads(encode(message))["value"] == found["value"]:
                return message
            problem = f"{kind.__name__} has other keys"
        except ValidationError as error:  # whose own text quotes values
            first = error.errors(include_input=False)[0]
            problem = f"{kind.__name__}.{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise EnvironmentFault(f"dtrain {__version__} here, {found['dtrain']} there: versions differ ({problem})")


@cache
def adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """What reads such a value from JSON."""
    return TypeAdapter(kind)
