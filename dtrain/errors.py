"""What can go wrong, and the exit code of each.

    DtrainError            70  our bug
    ├── RecipeError         2  the recipe or the command line
    │   └── FieldError      2  one field of one section
    ├── EnvironmentFault    3  disk, permission, devices, a missing package
    │   └── LeftBehind      3  something rented is still there
    ├── DataError           4  data missing, damaged or of the wrong shape
    ├── CheckpointError     5  no usable checkpoint
    ├── Locked              6  another run writes to the same folder
    ├── NotFinite           7  loss or gradients are NaN or infinite
    ├── Exhausted           8  started again too often without getting on
    ├── Hung                9  no progress
    ├── Stopped            75  asked to stop, saved; run again to go on
    └── Aborted           130  asked to stop a second time; left at once

A message says what is wrong; the hint says what to do about it.
"""

from collections.abc import Sequence
from typing import Any


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
    """Something that was rented could not be taken away, and may cost money."""


class DataError(DtrainError):
    """Data is missing, damaged, empty, or not what the model takes."""

    exit_code = 4


class CheckpointError(DtrainError):
    """No checkpoint can be used."""

    exit_code = 5


class Locked(DtrainError):
    """The run folder belongs to another run that is alive."""

    exit_code = 6


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


class Aborted(DtrainError):
    """The run was asked to stop twice and left without saving."""

    exit_code = 130
