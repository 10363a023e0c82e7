"""Faults of the disk while a checkpoint is written or read: one line each, with the operating system's own reason."""

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dtrain.checkpoint import incomplete
from dtrain.core.errors import OS_CODE, DtrainError, EnvironmentFault, cause, way_out


@contextmanager
def writing(path: Path, step: int, holds: Callable[[], None]) -> Iterator[None]:
    """EnvironmentFault where a step cannot be written to this folder of checkpoints. `holds` raises where the
    run may no longer write there."""
    try:
        yield
    except (OSError, ValueError) as error:
        holds()
        hint = "; ".join(part for part in ("earlier checkpoints were not touched", way_out(error)) if part)
        raise EnvironmentFault(f"could not save step {step} to {path}: {cause(error)}", hint) from error


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """EnvironmentFault where a checkpoint whose bytes are as they were written cannot be read."""
    try:
        yield
    except DtrainError:
        raise
    except Exception as error:  # orbax raises bare Exception, and much else
        message = f"checkpoint {place.parent} matches its manifest but cannot be restored: {cause(error)}"
        raise EnvironmentFault(message, "it is left as it is; look for memory, open files, the file system") from error


def discard(checkpoints: Path, step: int, holds: Callable[[], None]) -> None:
    """Remove a step that was half written, so that a full disk does not stay full. `holds` raises where another
    run writes there, or where the run folder was moved."""
    made_again: list[Path] = []
    try:
        holds()
    except EnvironmentFault:
        made_again = [checkpoints, checkpoints.parent]  # orbax has made the moved folder again
    incomplete.drop(checkpoints, step)
    for folder in made_again:
        folder.rmdir()  # which takes none that holds anything


class _Repeated(logging.Filter):
    """Drops what orbax and asyncio log of an error of a save that is also raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        _, error, trace = record.exc_info or (None, None, None)
        text = f"{record.msg}{error}"
        if OS_CODE.search(text) or "_SignalingThread.run() raised" in text:
            return False
        if record.name != "asyncio" and not isinstance(error, OSError):
            return True
        return not any("/orbax/" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))


_REPEATED = _Repeated()


@contextmanager
def once() -> Iterator[None]:
    """While inside, an error of a save is shown once, not by each thread that it passes through."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_REPEATED)  # and stays: futures are logged when they are collected
    before = sys.unraisablehook

    def hook(shown: "sys.UnraisableHookArgs") -> None:
        if not (isinstance(shown.exc_value, RuntimeError) and str(shown.exc_value) == "Event loop is closed"):
            before(shown)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before
