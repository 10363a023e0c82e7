"""What can go wrong, and the exit code of each.

    DtrainError            70  our bug
    ├── RecipeError         2  the recipe or the command line
    │   └── FieldError      2  one field of one section
    ├── EnvironmentFault    3  disk, permission, devices, a missing package
    │   └── LeftBehind      3  something that was started may still run
    ├── DataError           4  data missing, damaged or of the wrong shape
    ├── CheckpointError     5  no usable checkpoint
    ├── Locked              6  another run writes to the same folder
    ├── NotFinite           7  loss or gradients are NaN or infinite
    ├── Exhausted           8  started again too often without getting on
    ├── Hung                9  no progress
    ├── Stopped            75  asked to stop, saved; run again to go on
    │   ├── HostLost       75  another host is lost, and the engine replaces it
    │   └── StopRequested   0  a stop request, or the hours are over; saved
    └── Aborted           130  asked to stop a second time; left at once

A message says what is wrong; the hint says what to do about it.
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
OTHER_KIND = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG}
MACHINE = {
    errno.ENOENT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY,
    errno.ENODEV, errno.ENOTCONN, errno.EREMOTEIO, *FULL, *DENIED, *OTHER_KIND,
}  # fmt: skip
"""Answers of the operating system for which the machine or its files are at fault, not the program."""

OS_CODE = re.compile(r"os_error_code='(\d+)'")
"""How tensorstore, which writes checkpoints, quotes the operating system."""

GONE = re.compile(r"Gloo .* failed: .*(reset by peer|closed by peer|Timed out|refused)")
"""What collectives on CPUs report when a process of the run, here or on another machine, has died."""

LONGEST = 300
"""Characters of a foreign error that are shown."""


class DtrainError(Exception):
    """An error for the user: a message, an optional hint, an exit code."""

    exit_code = 70

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), vars(self))  # so that it crosses from one process to another

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


def _again(kind: type[DtrainError], values: dict[str, Any]) -> DtrainError:
    error = kind.__new__(kind)
    vars(error).update(values)
    return error


class RecipeError(DtrainError):
    """The recipe or the command line cannot be used; holds one line for each problem."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str], hint: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems), hint)


class FieldError(RecipeError):
    """A value that its own section refuses; `field` is the dotted path inside that section."""

    def __init__(self, field: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.field = field


class EnvironmentFault(DtrainError):
    """The machine cannot do what was asked."""

    exit_code = 3


class LeftBehind(EnvironmentFault):
    """Something that was started could not be taken down, and may cost money."""


class DataError(DtrainError):
    """Data is missing, damaged, empty, or not what the model takes."""

    exit_code = 4


class CheckpointError(DtrainError):
    """No checkpoint can be used."""

    exit_code = 5


class Locked(DtrainError):
    """The run folder belongs to another run that is alive."""

    exit_code = 6


class Taken(Locked):
    """Another run has taken the folder over from this one."""


class NotFinite(DtrainError):
    """The loss, its gradients or the state became NaN or infinite."""

    exit_code = 7


class Exhausted(DtrainError):
    """The run was started again too often without saving anything new."""

    exit_code = 8


class Hung(DtrainError):
    """A process made no progress for too long."""

    exit_code = 9


class Stopped(DtrainError):
    """The run was asked to stop and has saved its state."""

    exit_code = 75


class HostLost(Stopped):
    """A process on another host is gone, and the engine that started the run replaces that host."""


class StopRequested(Stopped):
    """The run was asked to end by a file in its folder or by its limit of hours; what there was to save is saved."""

    exit_code = 0


class Aborted(DtrainError):
    """The run was asked to stop twice and left without saving."""

    exit_code = 130


def user_error(error: BaseException) -> DtrainError | None:
    """The error for the user that an exception amounts to; None where it is a bug.

    The one mapping from exceptions to exit codes: the command line and run.json both use it.
    """
    if isinstance(error, DtrainError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Aborted("interrupted")
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("dtrain"):
        hint = "install it, or all that dtrain needs with `make install`"
        return EnvironmentFault(f"the package {error.name} is missing", hint)
    if any(code in MACHINE for code, _ in _answers(error)):
        return EnvironmentFault(cause(error), way_out(error))
    if GONE.search(str(error)):
        return Hung(f"another process of the run is gone: {_first_line(error)[:200]}")
    return None


def cause(error: BaseException) -> str:
    """Why something failed, in one line: the answer of the operating system if there is one in the chain of
    exceptions, else the first line of the error."""
    for code, path in _answers(error):
        text = next((found for found in _texts(error, code) if found), os.strerror(code))
        missing = path and code == errno.ENOENT and not Path(path).parent.exists()
        gone = " (its folder is gone: moved or deleted meanwhile)" if missing else ""
        return f"{text}: {path}{gone}" if path else text
    return _first_line(error)


def way_out(error: BaseException) -> str:
    """What to do about an error of the operating system."""
    code = next((code for code, _ in _answers(error)), 0)
    if code in FULL:
        return "free some space, or write elsewhere"
    if code in DENIED:
        return "check the permissions of that path, or write elsewhere"
    if code in OTHER_KIND:
        return "something else has this name: move it away"
    if code in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files: ulimit -n"
    return "" if code == errno.ENOENT else "`dtrain doctor` checks the machine"


def _answers(error: BaseException) -> Iterator[tuple[int, str]]:
    """Error numbers of the operating system along the chain of causes, each with its path where that is known."""
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno:
            yield one.errno, str(one.filename or "")
        else:
            yield from ((int(code), "") for code in OS_CODE.findall(str(one))[:1])


def _texts(error: BaseException, code: int) -> Iterator[str]:
    return (one.strerror or "" for one in _chain(error) if isinstance(one, OSError) and one.errno == code)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, those that it was raised from, and the members of a group; never in a circle."""
    seen, left = set[int](), [error]
    while left:
        one = left.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += [one.__cause__] if one.__cause__ else []
        left += one.exceptions if isinstance(one, BaseExceptionGroup) else []


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:LONGEST]
