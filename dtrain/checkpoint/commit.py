"""How a save becomes a checkpoint: each process digests its share, the first writes the manifest and renames."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dtrain import faults
from dtrain.checkpoint import manifest
from dtrain.checkpoint.manifest import Manifest
from dtrain.checkpoint.retry import retried
from dtrain.folder import Folder, overwrite

POLL, PATIENCE = 0.01, 1200.0
"""Seconds between looks for the parts of other processes, and how long they are waited for."""


def commit(unfinished: Path, final: Path, told: Manifest, rank: int, processes: int, holds: Callable[[], None]) -> None:
    """Called in every process once all of `unfinished` is written; OSError where others do not do their part.

    `holds` raises where this run is no longer the one that may write.
    """
    state = unfinished / "state"
    mine = retried(lambda: manifest.digests(state, manifest.share(manifest.files_of(state), rank, processes)))
    retried(lambda: overwrite(_part(unfinished, rank), json.dumps(mine)))
    if rank:
        _until(final.is_dir, f"process 0 did not commit step {told.step}")
        return
    parts = [_part(unfinished, one) for one in range(processes)]
    _until(lambda: all(part.exists() for part in parts), f"not every process digested its part of step {told.step}")
    files = {f"state/{path}": digest for part in parts for path, digest in json.loads(part.read_text()).items()}
    for part in parts:
        part.unlink()
    if {f"state/{path}" for path in manifest.files_of(state)} != files.keys():
        raise OSError(f"files of step {told.step} came or went while they were digested")
    retried(lambda: replace(told, files=files).write(unfinished))
    retried(lambda: faults.strike("save:commit", rank))
    holds()
    metrics = Folder(final.parents[1]).metrics
    if metrics.exists():  # what was measured up to this step is kept before it is one to go on from
        _sync(metrics)
    retried(lambda: unfinished.rename(final))
    _sync(final.parent)
    faults.strike("save:committed", rank)


def all_agree(mine: bool, processes: int) -> bool:
    """Whether it is so in every process; each waits for the others here."""
    if processes == 1:
        return mine
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.array([mine])).all())


def _part(folder: Path, rank: int) -> Path:
    return folder / f"digests-{rank}.json"


def _until(done: Callable[[], bool], failure: str) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > end:
            raise OSError(failure)
        time.sleep(POLL)


def _sync(path: Path) -> None:
    """What was written to the file, or renamed in the folder, is on disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
