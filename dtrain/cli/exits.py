"""From an error to a message and an exit code."""

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dtrain.errors import Aborted, DtrainError, EnvironmentFault, Hung

MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE}
"""What the operating system says when the machine, not the program, is at fault."""

GONE = re.compile(r"Gloo .* failed: .*(reset by peer|closed by peer|Timed out|refused)")
"""What collectives of CPUs say where a process of the run, here or on another machine, has died."""

AGAIN = 0.5
"""Seconds until an interrupt that nobody heard is raised again."""


@contextmanager
def exits(debug: bool = False, leave: bool = False) -> Iterator[None]:
    """Turn errors into a few lines on stderr and the right exit code.

    A traceback is shown for our own bugs, and with `debug` for all. `leave` ends the process at
    once, without waiting for others that it runs together with.
    """
    try:
        yield
        return
    except DtrainError as error:
        if debug:
            traceback.print_exc()
        _tell(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = Aborted.exit_code
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        code = _unforeseen(error, debug)
    if leave:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C as a KeyboardInterrupt that is surely heard: raised again until `heard` is called, or this is left.

    JAX has callbacks in which an error, and with it the only KeyboardInterrupt, is lost.
    """

    def ask(_number: int, _frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
        raise KeyboardInterrupt

    def lost(told: "sys.UnraisableHookArgs") -> None:
        if not issubclass(told.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(told)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGALRM)}
    sys.unraisablehook = lost
    try:
        yield
    finally:
        heard()
        sys.unraisablehook = sys.__unraisablehook__
        for number, handler in before.items():
            signal.signal(number, handler)


def heard() -> None:
    """The interrupt need not be raised again."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _unforeseen(error: Exception, debug: bool) -> int:
    """A fault of the machine in a few lines; our own with all that is known of it."""
    if isinstance(error, OSError) and error.errno in MACHINE and not debug:
        where = error.filename or "while writing"
        _tell(EnvironmentFault(f"{error.strerror}: {where}", "`dtrain doctor` looks at the machine"))
        return EnvironmentFault.exit_code
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("dtrain") and not debug:
        hint = "install it, or all that dtrain needs with `make install`"
        _tell(EnvironmentFault(f"the package {error.name} is missing", hint))
        return EnvironmentFault.exit_code
    if GONE.search(str(error)) and not debug:
        _tell(Hung(f"another process of the run is gone: {str(error).splitlines()[0][:200]}"))
        return Hung.exit_code
    traceback.print_exc()
    typer.secho("this is a bug in dtrain, or in a model of your own", fg="red", err=True)
    return DtrainError.exit_code


def _tell(error: DtrainError) -> None:
    stopped = error.exit_code == 75
    label, colour = ("stopped", "yellow") if stopped else ("error", "red")
    typer.secho(f"{label}: ", fg=colour, bold=True, err=True, nl=False)
    typer.echo(error.message, err=True)
    if error.hint:
        typer.secho(f"hint: {error.hint}", fg="cyan", err=True)
