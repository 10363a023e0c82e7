"""How a save becomes a checkpoint: each process digests its share, the first writes the manifest, last of all."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dtrain.checkpoint import incomplete, manifest
from dtrain.checkpoint.manifest import Manifest
from dtrain.checkpoint.retry import retried
from dtrain.core import fault_injection
from dtrain.core.run_dir import overwrite

POLL, PATIENCE = 0.01, 1200.0
"""Seconds between looks for the parts of other processes, and how long they are waited for."""


def commit(folder: Path, pending: Manifest, rank: int, processes: int, holds: Callable[[], None]) -> None:
    """Called in every process once all of the step's `folder` is written; OSError where others do not do their part.

    `holds` raises where this run is no longer the one that may write.
    """
    state = folder / "state"
    mine = retried(lambda: manifest.digests(state, manifest.share(manifest.files_of(state), rank, processes)))
    retried(lambda: overwrite(_part(folder, rank), json.dumps(mine)))
    if rank:
        _until((folder / manifest.NAME).exists, f"process 0 did not commit step {pending.step}")
        return
    parts = [_part(folder, one) for one in range(processes)]
    _until(lambda: all(part.exists() for part in parts), f"not every process digested its part of step {pending.step}")
    files = {f"state/{path}": digest for part in parts for path, digest in json.loads(part.read_text()).items()}
    for part in parts:
        part.unlink()
    if {f"state/{path}" for path in manifest.files_of(state)} != files.keys():
        raise OSError(f"files of step {pending.step} came or went while they were digested")
    retried(lambda: fault_injection.strike("save:commit", rank))
    holds()
    retried(lambda: replace(pending, files=files).write(folder))
    _sync(folder)
    fault_injection.strike("save:manifest", rank)
    incomplete.end(folder.parent, pending.step)
    _sync(folder.parent)
    fault_injection.strike("save:committed", rank)


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
