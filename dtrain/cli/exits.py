"""Turn errors into messages and exit codes."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import typer

from dtrain.core import signals
from dtrain.core.errors import Aborted, DtrainError, RecipeError, Stopped, user_error
from dtrain.core.printable import printable

AGAIN = 0.5
"""Seconds until an interrupt is raised again, unless it was handled."""
SOON = 0.05
"""The same for an interrupt that arrives while a module is being imported."""


@contextmanager
def exits(debug: bool = False, stoppable: bool = False) -> Iterator[None]:
    """Turn errors into a few lines on stderr and the right exit code.

    A traceback is shown for bugs in dtrain, and with `debug` for all errors. A verb that is `stoppable` handles
    signals itself; in the others Ctrl-C is a KeyboardInterrupt from here on.
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
        _print_error(error)
        code = Aborted.exit_code if stopped and not isinstance(error, Stopped) else error.exit_code
    except KeyboardInterrupt:
        signals.settle()
        code = Aborted.exit_code
        typer.echo("interrupted", err=True)
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        stopped = listener is not None and listener.interrupted()
        signals.settle()
        code = Aborted.exit_code if stopped else _unexpected(error, debug)
        if stopped:
            typer.echo("interrupted", err=True)
    raise typer.Exit(code)


@contextmanager
def interruptible() -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP a KeyboardInterrupt; within `signals.leaving_at_once` the end of the process.

    It is raised again until `cancel_interrupt` is called, or the block ends.
    JAX has callbacks in which an exception, and with it the only KeyboardInterrupt, is lost.
    """

    postponed = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal postponed
        importing = _importing(frame)
        postponed += importing and number != signal.SIGALRM
        if postponed > 1:
            signals.leave(Aborted.exit_code, "interrupted\n")  # second Ctrl-C: do not wait for the import
        signal.setitimer(signal.ITIMER_REAL, SOON if importing else AGAIN)
        if not importing:
            signals.leave_if_nothing_is_lost(Aborted.exit_code)
            raise KeyboardInterrupt

    def unraisable(failure: "sys.UnraisableHookArgs") -> None:
        if not issubclass(failure.exc_type, KeyboardInterrupt):
            hook(failure)

    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGALRM, *ending)}
    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        yield
    finally:
        cancel_interrupt()
        if sys.unraisablehook is unraisable:  # else a Store has installed its own for the rest of the process
            sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: extension modules would print the interrupt and raise another error."""
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def cancel_interrupt() -> None:
    """Stop raising the interrupt again: it was handled."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _unexpected(error: Exception, debug: bool) -> int:
    """Print a fault of the environment in a few lines, or a bug in dtrain with its traceback. Returns the exit code."""
    known = user_error(error)
    if debug or known is None:
        traceback.print_exc()
    if known is None:
        typer.secho("this is a bug in dtrain, or in a custom model", fg="red", err=True)
        typer.secho(f"more: dtrain help {DtrainError.topic}", dim=True, err=True)
        return DtrainError.exit_code
    _print_error(known)
    return known.exit_code


SHORT = b"error: out of memory, even for this message\n"


def _print_error(error: DtrainError) -> None:
    try:
        _show_error(error)
    except OSError:
        pass  # stderr may be on the disk that is full: the exit code says it still
    except MemoryError:
        with suppress(OSError):
            os.write(2, SHORT)


def _explained(topic: str) -> str:
    """What `dtrain help` explains of a topic: the code of an error, or the longest known part of a key's path."""
    from dtrain.recipe.keys import known_part

    return topic if topic.startswith("E-") else known_part(topic) or RecipeError.topic


def _show_error(error: DtrainError) -> None:
    label, colour = ("stopped", "yellow") if isinstance(error, Stopped) else ("error", "red")
    typer.secho(f"{label}: ", fg=colour, bold=True, err=True, nl=False)
    typer.echo(printable(error.message), err=True)
    if error.hint:
        typer.secho(f"hint: {printable(error.hint)}", fg="cyan", err=True)
    if error.topic and not isinstance(error, Stopped | Aborted):
        typer.secho(f"more: dtrain help {_explained(error.topic)}", dim=True, err=True)
