"""Detect folders on a FUSE file system, such as a mounted bucket, and choose a local folder for frequent writes.

With gcsfuse every close of a changed file uploads it, even a close by a process that only read it. So files that change
often and are read only on the same host are kept on the host's own disk.
"""

import hashlib
import os
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


def is_fuse(path: Path) -> bool:
    """Whether the path, or its nearest existing parent folder, is on a FUSE file system; False if that is unknown."""
    try:
        device = _existing(path).stat().st_dev
        mounts = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = (line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number)
    return any(kind == "fuse" or kind.startswith("fuse.") for kind in kinds)


def on_this_host(folder: Path) -> Path:
    """The folder for files about `folder` that only this host reads; the same for every process of a user.

    It is `folder` itself, or a folder in the user's cache if `folder` is on FUSE and the cache is writable.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home folder
        return folder
    if not is_fuse(folder) or not os.access(_existing(cache), os.W_OK):
        return folder
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    return cache / "dtrain" / "heartbeats" / name


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    return next((candidate for candidate in (path, *path.parents) if candidate.exists()), path)
