"""Marker files for steps that are being written or deleted, so that no folder is ever renamed.

    checkpoints/.incomplete-120    checkpoints/120 is a checkpoint only if it also has a manifest

On a bucket without atomic folder renames a folder is renamed object by object: a process that is killed meanwhile
leaves two halves. A marker is a single object, as a manifest is.
"""

import shutil
from pathlib import Path

from dtrain.core import fault_injection
from dtrain.core.run_dir import INCOMPLETE, MANIFEST, is_step, marker

FORMER = (".trash", ".unfinished")
"""Folders in which earlier versions had steps that were being deleted or written."""


def begin(checkpoints: Path, step: int) -> Path:
    """Create an empty folder, with a marker, for a step that is about to be written."""
    folder = checkpoints / str(step)
    marker(checkpoints, step).touch()
    empty(folder)
    folder.mkdir(exist_ok=True)
    return folder


def end(checkpoints: Path, step: int) -> None:
    """Remove the marker of a step whose manifest is written or whose folder is deleted."""
    marker(checkpoints, step).unlink(missing_ok=True)


def retire(checkpoints: Path, step: int) -> None:
    """Delete a step, its manifest first: without that it is not a checkpoint any more."""
    marker(checkpoints, step).touch()
    (checkpoints / str(step) / MANIFEST).unlink(missing_ok=True)
    fault_injection.strike("retire")
    drop(checkpoints, step)


def drop(checkpoints: Path, step: int) -> None:
    """Delete the folder of an incomplete step, then its marker."""
    empty(checkpoints / str(step))
    if not (checkpoints / str(step)).exists():
        end(checkpoints, step)


def sweep(checkpoints: Path) -> None:
    """Delete the steps that an earlier start was writing or deleting when it ended."""
    for name in FORMER:
        empty(checkpoints / name)
    for path in sorted(checkpoints.glob(f"{INCOMPLETE}*")):
        name = path.name.removeprefix(INCOMPLETE)
        if is_step(name) and (checkpoints / name / MANIFEST).exists():
            path.unlink()
        elif is_step(name):
            drop(checkpoints, int(name))


def empty(folder: Path) -> None:
    """Delete a folder and its contents; a symbolic link is not followed or deleted."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
