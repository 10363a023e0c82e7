"""Whether a folder is on a file system that a program serves (FUSE), as mounted buckets are, and what follows.

On gcsfuse every close of a changed file uploads it, also by a process that only read it. So what changes all the time
and is read on the same host alone is kept on the host's own disk.
"""

import hashlib
import os
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


def is_fuse(path: Path) -> bool:
    """Whether the path, or where it does not exist the folder that it would be in, is on such a file system."""
    try:
        device = _existing(path).stat().st_dev
        mounts = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = (line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number)
    return any(kind == "fuse" or kind.startswith("fuse.") for kind in kinds)


def on_this_host(folder: Path) -> Path:
    """Where this host keeps the files about a folder that only itself reads: in the folder, or for one on FUSE in
    the user's cache, if that can be written to. The same for every process of a user."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        return folder
    if not is_fuse(folder) or not os.access(_existing(cache), os.W_OK):
        return folder
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    return cache / "dtrain" / "heartbeats" / name


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next((one for one in (path, *path.parents) if one.exists()), path)
