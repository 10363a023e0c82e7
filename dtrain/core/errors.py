"""The error classes and their exit codes.

    DtrainError            70  our bug
    ├── RecipeError         2  the recipe or the command line
    │   └── FieldError      2  one field of one section
    ├── EnvironmentFault    3  disk, permissions, devices, a missing package
    │   └── LeftBehind      3  a resource that was started may still be running
    ├── DataError           4  data missing, damaged or of the wrong shape
    ├── CheckpointError     5  no usable checkpoint
    ├── Locked              6  another run writes to the same folder
    ├── NotFinite           7  loss or gradients are NaN or infinite
    ├── Exhausted           8  too many restarts without a new checkpoint
    ├── Hung                9  no progress
    ├── Stopped            75  stopped after a save; the same command resumes
    │   ├── HostLost       75  another host is lost, and the engine replaces it
    │   └── StopRequested   0  stop request or time limit; saved
    └── Aborted           130  second stop signal; exited without saving

The message describes the problem; the hint describes how to fix it.
"""

import errno
import os
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dtrain.core import extras

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
OTHER_KIND = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG}
MACHINE = {
    errno.ENOENT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY,
    errno.ENODEV, errno.ENOTCONN, errno.EREMOTEIO, *FULL, *DENIED, *OTHER_KIND,
}  # fmt: skip
"""Error numbers of the operating system that point to the machine or its files, not to a bug in dtrain."""

OS_CODE = re.compile(r"os_error_code='(\d+)'")
"""Format in which tensorstore, the library that writes checkpoints, reports an error number."""

MEMORY = re.compile(
    r"can't start new thread|failed to map segment|[Cc]annot allocate memory|std::bad_alloc|RESOURCE_EXHAUSTED"
    r"|[Oo]ut of memory|cannot join thread before it is started"
)
"""What libraries say when the process gets no more memory or threads."""
NO_MEMORY = "end other programs, raise the limits (ulimit -v, ulimit -u), or make model or batch smaller"
NEAR = 64 * 2**20
"""Bytes below the limit of memory at which an allocation may have failed."""

GONE = re.compile(
    r"(Gloo .* failed|^UNAVAILABLE): .*(reset by peer|closed by peer|Timed out|refused|Socket closed)"
    r"|^UNAVAILABLE: [\s\S]* remote target coordination_service"
)
"""Error of CPU collectives (Gloo), or of JAX's coordination service, when a process of the run has died, here or on
another host."""

LONGEST = 300
"""Maximum number of characters shown of another library's error."""


Problem = tuple[str, str, str]
"""Dotted path of a key of the recipe, what is wrong there, and the way out."""


class DtrainError(Exception):
    """An error for the user: a message, an optional hint, an exit code."""

    exit_code = 70
    topic = "E-BUG"
    """What `dtrain help` explains more about it by: a section of docs/errors.md, or a key of the recipe."""

    def __init__(self, message: str, hint: str = "", topic: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.topic = topic or self.topic

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), vars(self))  # the default would call __init__ with the wrong arguments

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


def _rebuild(kind: type[DtrainError], values: dict[str, object]) -> DtrainError:
    """Unpickle an error without calling its __init__."""
    error = kind.__new__(kind)
    vars(error).update(values)
    return error


class RecipeError(DtrainError):
    """The recipe or the command line is invalid; `problems` has one line per problem."""

    exit_code = 2
    topic = "E-RECIPE"

    def __init__(self, problems: str | Sequence[str], hint: str = "", topic: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems), hint, topic)


class FieldError(RecipeError):
    """A recipe section rejects a value; `field` is the dotted path within that section."""

    def __init__(self, field: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.field = field


class EnvironmentFault(DtrainError):
    """The machine or its environment prevents the operation."""

    exit_code = 3
    topic = "E-ENVIRONMENT"


class LeftBehind(EnvironmentFault):
    """A resource that was started could not be shut down and may cost money."""

    topic = "E-LEFT-BEHIND"


class DataError(DtrainError):
    """Data is missing, damaged, empty, or does not fit the model."""

    exit_code = 4
    topic = "E-DATA"


class CheckpointError(DtrainError):
    """No usable checkpoint exists."""

    exit_code = 5
    topic = "E-CHECKPOINT"


class Locked(DtrainError):
    """Another running process uses the run folder."""

    exit_code = 6
    topic = "E-LOCKED"


class TakenOver(Locked):
    """Another run has taken over the run folder from this one."""


class NotFinite(DtrainError):
    """The loss, its gradients or the training state became NaN or infinite."""

    exit_code = 7
    topic = "E-NOT-FINITE"


class Exhausted(DtrainError):
    """The run was restarted too often without a new checkpoint."""

    exit_code = 8
    topic = "E-RESTARTS"


class Hung(DtrainError):
    """A process made no progress within its time limit."""

    exit_code = 9
    topic = "E-HANG"


class Stopped(DtrainError):
    """The run received a stop signal and saved its state."""

    exit_code = 75
    topic = "E-STOPPED"


class HostLost(Stopped):
    """A process on another host was lost, and the engine that started the run replaces that host."""


class StopRequested(Stopped):
    """The run ended because of a stop request in its folder or its time limit; its state is saved."""

    exit_code = 0


class Aborted(DtrainError):
    """The run received a second stop signal and exited without saving."""

    exit_code = 130
    topic = "E-INTERRUPTED"


def user_error(error: BaseException) -> DtrainError | None:
    """Convert any exception to an error for the user; None if it is a bug.

    The only mapping from exceptions to exit codes: the command line, run.json and notifications use it.
    """
    if isinstance(error, DtrainError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Aborted("interrupted")
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("dtrain"):
        return missing_package(error)
    if short := next((link for link in _chain(error) if _is_memory(link)), None):
        return EnvironmentFault(f"out of memory: {_first_line(short)}"[:LONGEST], NO_MEMORY, "E-MEMORY")
    if any(code in MACHINE for code, _ in _os_errors(error)):
        return EnvironmentFault(cause(error), way_out(error))
    return lost_connection(error)


def missing_package(error: ModuleNotFoundError) -> DtrainError:
    """The error for the user if a package is not installed."""
    name = (error.name or str(error)).partition(".")[0]
    use = extras.use_of(name)
    message = f"the package {name} is missing{use and f': it {use}'}"
    return EnvironmentFault(message, extras.command([name]), "E-PACKAGE")


def _is_memory(error: BaseException) -> bool:
    """Whether an error says that the machine, or a limit of the process, has no more memory or threads."""
    if isinstance(error, SystemError | ImportError) and _at_limit():
        return True  # a C function got no memory, and raised nothing or something else
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | ImportError | SystemError | OSError) and bool(MEMORY.search(str(error)))
    )


def _at_limit() -> bool:
    """Whether the process has mapped as much memory as its limit allows (ulimit -v), but for less than NEAR."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return False
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() > most - NEAR
    return False


def lost_connection(error: BaseException) -> Hung | None:
    """The error for the user if a collective failed because another process of the run has died; None otherwise."""
    failed = next((link for link in _chain(error) if GONE.search(str(link))), None)
    return failed and Hung(f"lost the connection to another process of the run: {_first_line(failed)[:200]}")


def cause(error: BaseException) -> str:
    """Why an operation failed, in one line: the operating system's message if the exception chain contains one,
    else the first line of the error."""
    for code, path in _os_errors(error):
        text = next(filter(None, _texts(error, code)), os.strerror(code))
        folder_missing = path and code == errno.ENOENT and not Path(path).parent.exists()
        note = " (its folder no longer exists: it was moved or deleted)" if folder_missing else ""
        return f"{text}: {path}{note}" if path else text
    return _first_line(error)


def way_out(error: BaseException) -> str:
    """How to fix an error of the operating system, as a hint; empty if there is no advice."""
    code = next((code for code, _ in _os_errors(error)), 0)
    if code in FULL:
        return "free some space, or write elsewhere"
    if code in DENIED:
        return "check the permissions of that path, or write elsewhere"
    if code in OTHER_KIND:
        return "another kind of file has this name: move it away"
    if code in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files: ulimit -n"
    return "" if code == errno.ENOENT else "`dtrain doctor` checks the machine"


def _os_errors(error: BaseException) -> Iterator[tuple[int, str]]:
    """Error numbers of the operating system in the exception chain, each with its path if known, else ''."""
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno:
            yield link.errno, str(link.filename or "")
        else:
            yield from ((int(code), "") for code in OS_CODE.findall(str(link))[:1])


def _texts(error: BaseException, code: int) -> Iterator[str]:
    return (link.strerror or "" for link in _chain(error) if isinstance(link, OSError) and link.errno == code)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, its causes and the members of exception groups, each once even if the causes form a cycle."""
    visited, pending = set[int](), [error]
    while pending:
        link = pending.pop(0)
        if id(link) in visited:
            continue
        visited.add(id(link))
        yield link
        pending += [link.__cause__] if link.__cause__ else []
        pending += link.exceptions if isinstance(link, BaseExceptionGroup) else []


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:LONGEST]
