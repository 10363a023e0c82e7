"""Temporary files and folders that a killed process left behind: the next one that writes there removes them.

Their names contain this host's name, and each is locked by the process that uses it, so that those of other hosts and
of living processes stay.
"""

import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from dtrain.core.signals import at_end

SETTLED = 60.0
"""Seconds after which a file without a lock has no owner: before, its owner may not have locked it yet."""


@contextmanager
def part_of(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file beside `path`, opened for writing and locked, with its path. The caller renames or removes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    start = f".{path.name}-{_host()}-"
    sweep(path.parent, start)
    part = path.with_name(start + secrets.token_hex(8))
    with part.open("wb") as file:
        _lock(file.fileno())
        yield part, file


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """A new folder in the system's folder for temporary files, removed at the end."""
    start = f"dtrain-{kind}-{_host()}-"
    sweep(Path(tempfile.gettempdir()), start)
    folder = Path(tempfile.gettempdir(), start + secrets.token_hex(8))
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    at_end.append(remove)  # an interrupt may end the removal below, or come just before it
    folder.mkdir(mode=0o700)
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle)
        yield folder
    finally:
        os.close(handle)
        remove()
        at_end.remove(remove)


def sweep(folder: Path, start: str) -> None:
    """Remove what processes of this host that no longer live left in `folder` under names that begin with `start`."""
    with suppress(OSError):
        for name in [entry.name for entry in os.scandir(folder) if entry.name.startswith(start)]:
            with suppress(OSError):
                _remove(folder / name)


def _remove(path: Path) -> None:
    """Remove a file or folder unless a process has locked it, or it is new. OSError if it cannot be."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        about = os.fstat(handle)
        if about.st_uid != os.getuid() or time.time() - about.st_mtime < SETTLED:
            return
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    with suppress(OSError):  # not every network file system supports locks: then nothing is removed there either
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:64]
