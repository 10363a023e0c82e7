"""Commit a save: each process digests its share of the files, then process 0 writes the manifest, last of all."""

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
from dtrain.core.files import overwrite

POLL, PATIENCE = 0.01, 1200.0
"""Seconds between polls for the files of other processes, and the longest wait for them."""


def commit(folder: Path, pending: Manifest, rank: int, processes: int, holds: Callable[[], None]) -> None:
    """Called in every process once all files of the step's `folder` are written.

    `holds` raises if this run no longer holds the lock of its folder. Raises OSError if other processes do not finish
    their part in time, or if files changed meanwhile.
    """
    state = folder / "state"
    mine = retried(lambda: manifest.digests(state, manifest.share(manifest.files_of(state), rank, processes)))
    retried(lambda: overwrite(_part(folder, rank), json.dumps(mine)))
    if rank:
        _until((folder / manifest.NAME).exists, f"process 0 did not commit step {pending.step}")
        return
    parts = [_part(folder, other) for other in range(processes)]
    _until(lambda: all(part.exists() for part in parts), f"not every process digested its part of step {pending.step}")
    files = {f"state/{path}": digest for part in parts for path, digest in json.loads(part.read_text()).items()}
    for part in parts:
        part.unlink()
    if {f"state/{path}" for path in manifest.files_of(state)} != files.keys():
        raise OSError(f"files of step {pending.step} were added or removed while they were digested")
    retried(lambda: fault_injection.strike("save:commit", rank))
    holds()
    retried(lambda: replace(pending, files=files).write(folder))
    _sync(folder)
    fault_injection.strike("save:manifest", rank)
    incomplete.end(folder.parent, pending.step)
    _sync(folder.parent)
    fault_injection.strike("save:committed", rank)


def all_agree(mine: bool, processes: int) -> bool:
    """Whether `mine` is true in every process. A barrier: each process waits for the others."""
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
    """fsync a file, or a folder after a rename in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
