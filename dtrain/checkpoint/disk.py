"""Report disk errors while a checkpoint is written or read: once each, with the reason of the operating system."""

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dtrain.checkpoint import incomplete
from dtrain.core.errors import OS_CODE, DtrainError, EnvironmentFault, cause, lost_connection, way_out


@contextmanager
def writing(path: Path, step: int, holds: Callable[[], None]) -> Iterator[None]:
    """Raise EnvironmentFault if a step cannot be written to this folder of checkpoints.

    Raises Hung if another process of the run has died, which a save notices in its collectives like a step. `holds`
    raises if the run no longer holds the lock of its folder; that error then takes precedence.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        holds()
        if lost := lost_connection(error):
            raise lost from error
        hint = "; ".join(part for part in ("earlier checkpoints are unchanged", way_out(error)) if part)
        raise EnvironmentFault(f"could not save step {step} to {path}: {cause(error)}", hint) from error


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """Raise EnvironmentFault if a checkpoint whose files match its manifest cannot be restored, Hung if another process
    of the run has died meanwhile."""
    try:
        yield
    except DtrainError:
        raise
    except Exception as error:  # orbax raises many types, bare Exception included
        if lost := lost_connection(error):
            raise lost from error
        message = f"checkpoint {place.parent} matches its manifest but cannot be restored: {cause(error)}"
        hint = "the checkpoint is unchanged; check free memory, the limit of open files and the file system"
        raise EnvironmentFault(message, hint) from error


def discard(checkpoints: Path, step: int, holds: Callable[[], None]) -> None:
    """Remove a partly written step, so that a full disk does not stay full.

    `holds` raises Locked if another run holds the lock, EnvironmentFault if the run folder was moved.
    """
    recreated: list[Path] = []
    try:
        holds()
    except EnvironmentFault:
        recreated = [checkpoints, checkpoints.parent]  # orbax has created the moved folder again
    incomplete.drop(checkpoints, step)
    for folder in recreated:
        folder.rmdir()  # fails if it is not empty


class _Repeated(logging.Filter):
    """Drops log records of orbax and asyncio about an error of a save that is also raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        _, error, trace = record.exc_info or (None, None, None)
        text = f"{record.msg}{error}"
        if OS_CODE.search(text) or "_SignalingThread.run() raised" in text:
            return False
        if record.name != "asyncio" and not isinstance(error, OSError):
            return True
        return not any("/orbax/" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))


_REPEATED = _Repeated()


def report_once() -> None:
    """From here on, an error of a save is shown once, not by each thread that it passes through.

    Nothing is restored: asyncio logs at garbage collection, and threads of tensorstore report to the closed event loop
    of orbax after the save has failed, even after the Store is closed.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_REPEATED)
    before = sys.unraisablehook
    if getattr(before, "__module__", None) == __name__:
        return  # installed by an earlier Store

    def hook(shown: "sys.UnraisableHookArgs") -> None:
        if not (isinstance(shown.exc_value, RuntimeError) and str(shown.exc_value) == "Event loop is closed"):
            before(shown)

    sys.unraisablehook = hook
