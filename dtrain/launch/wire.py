"""Messages between the hosts and the machine where `dtrain launch` is run, and the runner's files on a host: frozen
dataclasses, the same at both ends, each encoded as one line of JSON:

    {"version": 3, "dtrain": "0.1.0", "type": "Reply", "value": {"problem": "...", ...}}
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from dtrain import __version__
from dtrain.core.errors import EnvironmentFault
from dtrain.core.heartbeat import Heartbeat
from dtrain.core.process_info import ProcessInfo

VERSION = 3
"""Increased when a class below or the behaviour of a verb changes."""
RUNS_HERE = "runs here already"
CODE = "code of dtrain"
"""The key of the digest of dtrain's code among the versions of a host."""
Verb = Literal["preflight", "folder_markers", "start", "status", "read", "logs", "stop", "fail", "kill"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HostJob:
    """One host's part of a run; `arguments` are the options of `dtrain run` after the recipe and the folder."""

    name: str
    folder: str
    runs: str
    arguments: tuple[str, ...] = ()
    rank: int = 0
    world_size: int = 1
    coordinator: str = ""
    """host:port of the rendezvous; empty if there is one host."""

    def environment(self) -> dict[str, str]:
        """Environment variables that give `dtrain run` its rank."""
        process = ProcessInfo(self.rank, self.world_size, self.coordinator)
        return process.environment() if self.coordinator else {}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to a host."""

    verb: Verb
    job: HostJob
    recipe: str = ""
    record: str = ""
    """The launch record, to be written to the run folder."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the run. Contains secrets, so it is never shown or written."""
    ready: str = ""
    """A file that exists when the host is set up; empty if there is none to wait for."""
    token: str = ""
    """Part of the names of the marker files, which show whether the hosts share one folder."""
    offset: int | None = None
    """Where to start in the log, in bytes; None: at the last start."""
    follow: bool = False
    path: str = ""
    """A file of the run folder to read, relative to it."""
    whole: bool = False
    """Whether to end all processes of the run on the host, or one that trains."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Reply of a host. `problem` is set if the request failed; which other fields are set depends on the verb."""

    problem: str = ""
    time: float = 0.0
    """Seconds since 1970, by the host's clock."""
    ready: bool = False
    setup: str = ""
    """Content of the ready file: the wheel that the host was set up from, if it says so."""
    versions: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """Reasons why the run cannot be started."""
    items: tuple[int, ...] = ()
    """Ranks whose marker files were removed, or PIDs that were started, asked to stop, or killed."""
    alive: bool = False
    recipe: str = ""
    """The recipe of the run that is alive."""
    code: int | None = None
    """Exit code of the run on the host; None while it has not ended."""
    state: str = ""
    """State in the run folder's run.json."""
    recorded: bool = False
    """Whether the run folder contains the launch record."""
    text: str | None = None
    """Progress of the run, or a line of the log; None at the end of the log."""
    offset: int | None = None
    """Byte offset after that line."""
    heartbeat: Heartbeat | None = None
    """The latest heartbeat of the run's first process on the host."""


@dataclass(frozen=True)
class ProcessFile:
    """runner.json and run.json of a host: a process, its start time, which distinguishes it from a later process with
    the same PID, the byte offset of its log, and its final exit code."""

    pid: int
    start_time: str | None
    log_offset: int = 0
    code: int | None = None


def encode(message: Any) -> str:
    """The message as one line of JSON, without the newline."""
    value = {"version": VERSION, "dtrain": __version__, "type": type(message).__name__, "value": asdict(message)}
    return json.dumps(value)


def decode(text: str, kind: type[T]) -> T:
    """Decode a message. ValueError if the text is not a message, EnvironmentFault if its version differs."""
    envelope = json.loads(text)
    if not isinstance(envelope, dict) or not envelope.keys() >= {"version", "dtrain", "type", "value"}:
        raise ValueError("not a message of dtrain")
    problem = f"{envelope['type']} of version {envelope['version']}, not {kind.__name__} of version {VERSION}"
    if (envelope["type"], envelope["version"]) == (kind.__name__, VERSION):
        try:
            message = adapter(kind).validate_json(json.dumps(envelope["value"]), strict=True)
            if json.loads(encode(message))["value"] == envelope["value"]:
                return message
            problem = f"{kind.__name__} has different keys"
        except ValidationError as error:  # its own text would quote values, such as secrets
            first = error.errors(include_input=False)[0]
            problem = f"{kind.__name__}.{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise EnvironmentFault(f"dtrain {__version__} here, {envelope['dtrain']} there: versions differ ({problem})")


@cache
def adapter(kind: type[object]) -> TypeAdapter[Any]:
    """The (cached) validator of a type."""
    return TypeAdapter(kind)
