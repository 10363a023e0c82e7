"""From an error to a message and an exit code."""

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from dtrain.core import signals
from dtrain.core.errors import Aborted, DtrainError, Stopped, user_error

AGAIN = 0.5
"""Seconds until an interrupt that was lost is raised again."""
SOON = 0.05
"""The same for one that came while a module was being imported."""


@contextmanager
def exits(debug: bool = False, stoppable: bool = False) -> Iterator[None]:
    """Turn errors into a few lines on stderr and the right exit code.

    A traceback is shown for our own bugs, and with `debug` for all. A verb that is `stoppable` reacts to
    signals by itself; in the others Ctrl-C is a KeyboardInterrupt from here on.
    """
    listener = signals.current()
    try:
        if listener and not stoppable:
            listener.release()
        yield
        return
    except DtrainError as error:
        stopped = not stoppable and listener is not None and listener.interrupted()
        signals.settle()
        if debug:
            traceback.print_exc()
        _tell(error)
        code = Aborted.exit_code if stopped else error.exit_code
    except KeyboardInterrupt:
        signals.settle()
        code = Aborted.exit_code
        typer.echo("interrupted", err=True)
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        stopped = listener is not None and listener.interrupted()
        signals.settle()
        code = Aborted.exit_code if stopped else _unforeseen(error, debug)
        if stopped:
            typer.echo("interrupted", err=True)
    raise typer.Exit(code)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C as a KeyboardInterrupt that is not lost: raised again until `heard` is called, or this is left.

    JAX has callbacks in which an error, and with it the only KeyboardInterrupt, is lost.
    """

    postponed = 0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal postponed
        importing = _importing(frame)
        postponed += importing and number == signal.SIGINT
        if postponed > 1:
            signals.leave(Aborted.exit_code, "interrupted\n")  # asked twice: do not wait for the import
        signal.setitimer(signal.ITIMER_REAL, SOON if importing else AGAIN)
        if not importing:
            raise KeyboardInterrupt

    def lost(failure: "sys.UnraisableHookArgs") -> None:
        if not issubclass(failure.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(failure)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGALRM)}
    sys.unraisablehook = lost
    try:
        yield
    finally:
        cancel_interrupt()
        sys.unraisablehook = sys.__unraisablehook__
        for number, handler in before.items():
            signal.signal(number, handler)


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: extension modules print the error and turn it into another one."""
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def cancel_interrupt() -> None:
    """The interrupt need not be raised again."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _unforeseen(error: Exception, debug: bool) -> int:
    """A fault of the machine in a few lines; our own with all that is known of it."""
    known = user_error(error)
    if debug or known is None:
        traceback.print_exc()
    if known is None:
        typer.secho("this is a bug in dtrain, or in a model of your own", fg="red", err=True)
        return DtrainError.exit_code
    _tell(known)
    return known.exit_code


def _tell(error: DtrainError) -> None:
    label, colour = ("stopped", "yellow") if isinstance(error, Stopped) else ("error", "red")
    typer.secho(f"{label}: ", fg=colour, bold=True, err=True, nl=False)
    typer.echo(error.message, err=True)
    if error.hint:
        typer.secho(f"hint: {error.hint}", fg="cyan", err=True)
