"""Folders of steps that are being written or deleted: each has a marker beside it, so that none is ever renamed.

    checkpoints/.incomplete-120    what is in checkpoints/120 counts only where a manifest is there too

On a plain bucket a folder is renamed object by object: a process that dies in between leaves two halves.
A marker is one object, as a manifest is.
"""

import shutil
from pathlib import Path

from dtrain.core import fault_injection
from dtrain.core.run_dir import INCOMPLETE, MANIFEST, is_step, marker

FORMER = (".trash", ".unfinished")
"""Where earlier versions kept steps that were being deleted or written."""


def begin(checkpoints: Path, step: int) -> Path:
    """An empty folder for a step that is about to be written."""
    folder = checkpoints / str(step)
    marker(checkpoints, step).touch()
    empty(folder)
    folder.mkdir(exist_ok=True)
    return folder


def end(checkpoints: Path, step: int) -> None:
    """The step's manifest is written: what it names counts."""
    marker(checkpoints, step).unlink(missing_ok=True)


def retire(checkpoints: Path, step: int) -> None:
    """Delete a step, its manifest first: from then on it counts no more."""
    marker(checkpoints, step).touch()
    (checkpoints / str(step) / MANIFEST).unlink(missing_ok=True)
    fault_injection.strike("retire")
    drop(checkpoints, step)


def drop(checkpoints: Path, step: int) -> None:
    """Delete what lies in the folder of an incomplete step; the marker goes last."""
    empty(checkpoints / str(step))
    if not (checkpoints / str(step)).exists():
        end(checkpoints, step)


def sweep(checkpoints: Path) -> None:
    """Delete what an earlier start was writing or deleting when it died."""
    for name in FORMER:
        empty(checkpoints / name)
    for path in sorted(checkpoints.glob(f"{INCOMPLETE}*")):
        name = path.name.removeprefix(INCOMPLETE)
        if is_step(name) and (checkpoints / name / MANIFEST).exists():
            path.unlink()
        elif is_step(name):
            drop(checkpoints, int(name))


def empty(folder: Path) -> None:
    """Delete a folder and what is in it; a link is left alone."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
