"""From an error to a message and an exit code."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dtrain.errors import Aborted, DtrainError


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
    except Exception:
        traceback.print_exc()
        typer.secho("this is a bug in dtrain, or in a model of your own", fg="red", err=True)
        code = DtrainError.exit_code
    if leave:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def _tell(error: DtrainError) -> None:
    stopped = error.exit_code == 75
    label, colour = ("stopped", "yellow") if stopped else ("error", "red")
    typer.secho(f"{label}: ", fg=colour, bold=True, err=True, nl=False)
    typer.echo(error.message, err=True)
    if error.hint:
        typer.secho(f"hint: {error.hint}", fg="cyan", err=True)
