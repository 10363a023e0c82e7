"""The `dtrain` command, also as `python -m dtrain`: signals are caught before anything heavy is imported."""

import os
import sys

from dtrain.core import signals

TYPE_CHECKING = False  # typing's own would be imported
if TYPE_CHECKING:
    from typer import Typer

UNWRITTEN = 3
"""Exit code if what was asked for could not be written: that of a fault of the environment."""


def main() -> None:
    """Run the command line and end the process."""
    run = next((word for word in sys.argv[1:] if not word.startswith("-")), "") == "run"
    signals.listen(run=run)
    app = _command_line()
    try:
        app()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if run or code == signals.ABORTED:
            signals.end(code)
        if code == 0 and not _flushed():
            signals.end(UNWRITTEN)
        raise


def _command_line() -> "Typer":
    """Import it. A fault of the machine meanwhile, such as too little memory, ends the process with its exit code."""
    try:
        from dtrain.cli import app
    except Exception as error:
        from dtrain.core.errors import user_error

        known = user_error(error)
        if known is None:
            raise
        os.write(2, f"error: {known.message}\nhint: {known.hint}\n".encode())
        signals.end(known.exit_code)
        raise
    return app


def _flushed() -> bool:
    """Whether all of stdout could be written. A reader that went away, such as `head`, has what it wants."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    except (OSError, ValueError):
        return False
    return True


if __name__ == "__main__":
    main()
