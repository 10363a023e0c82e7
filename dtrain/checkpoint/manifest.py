"""The manifest of a checkpoint, written last: size and digest of every file, and the conditions of the run."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dtrain.core.errors import OTHER_KIND
from dtrain.core.files import read_json
from dtrain.core.run_dir import MANIFEST as NAME
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject

FORMAT = 2
RENAMED = {"passed": "batches_skipped", "owed": "evaluation_pending", "seen": "guard_state"}
"""Keys of `conditions`, which format 1 called `about`, by their names in format 1."""
THREADS = 16
"""Files that are digested at the same time, at most."""


class CorruptCheckpoint(Exception):
    """A checkpoint has no manifest or does not match it; the text describes the difference."""


@dataclass(frozen=True)
class Manifest:
    """A committed step."""

    step: int
    conditions: JsonObject
    """Recipe, data, topology, versions, progress, as JSON values; see `dtrain.train.provenance.conditions_of`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    checksum: Sequence[int] = ()
    """Checksum of the state's bits, computed on the devices; () if there is none."""
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Bytes and SHA-256 of every file, by path inside the checkpoint."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write the manifest atomically, with fsync.

        A file is renamed, not a folder: on a bucket that is a single object, which exists completely or not at all.
        """
        values = asdict(self)
        values["sha256"] = _digest_of(values)
        part = folder / f"{NAME}.part"
        with part.open("w") as file:
            json.dump(values, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / NAME)


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises CorruptCheckpoint if it is missing or damaged, OSError if the machine is at fault and not the checkpoint.
    """
    try:
        values = read_json(folder / NAME)
        digest = values.pop("sha256")
        if _digest_of(values) != digest:
            raise CorruptCheckpoint("its manifest was changed after it was written")
        files = {path: (int(size), str(digest)) for path, (size, digest) in values["files"].items()}
        if values.get("format") == 1:
            old = values.pop("about")
            conditions = {RENAMED.get(key, key): value for key, value in old.items()}
            values |= {"conditions": conditions, "format": FORMAT}
        manifest = Manifest(**values | {"files": files})
    except FileNotFoundError:
        raise CorruptCheckpoint("it has no manifest: its save was never finished") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CorruptCheckpoint(f"its manifest cannot be read: {error}") from error
    except OSError as error:
        if error.errno not in OTHER_KIND:
            raise
        raise CorruptCheckpoint(f"its manifest cannot be read: {error.strerror}") from error
    if manifest.format != FORMAT:
        raise CorruptCheckpoint(
            f"its manifest has format {manifest.format}; this version of dtrain reads 1 and {FORMAT}"
        )
    if str(manifest.step) != folder.name and folder.name.isdecimal():
        raise CorruptCheckpoint(
            f"it has step {manifest.step}, renamed or copied; rename it to {manifest.step} to use it"
        )
    return manifest


def files_of(folder: Path) -> dict[str, int]:
    """Bytes of every file of a checkpoint except its manifest, by path inside it."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / NAME)
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def has_checkpoint(run_dir: Folder, step: int) -> bool:
    """Whether the checkpoint of a step is there, with every file in its size; their contents are not read."""
    folder = run_dir.checkpoints / str(step)
    try:
        return files_of(folder) == {name: size for name, (size, _) in read(folder).files.items()}
    except (CorruptCheckpoint, OSError):
        return False


def share(files: Mapping[str, int], rank: int, processes: int) -> list[str]:
    """The files that this process digests: by size, every `processes`-th one, so that all shares have similar bytes."""
    return sorted(files, key=lambda path: (-files[path], path))[rank::processes]


def digests(folder: Path, paths: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Bytes and SHA-256 of these files of a checkpoint, several at a time: hashing releases the GIL."""

    def digest(path: str) -> tuple[int, str]:
        with (folder / path).open("rb") as file:
            return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()

    paths = list(paths)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(paths, pool.map(digest, paths), strict=True))


def check(folder: Path, rank: int, processes: int) -> Manifest:
    """Compare the sizes of all files, and the digests of this process's share, with the manifest, and return it.

    Raises CorruptCheckpoint if they differ, OSError if the machine is at fault and not the checkpoint.
    """
    recorded = read(folder)
    for path, (size, _) in recorded.files.items():
        try:
            info = (folder / path).stat()
        except OSError as error:
            if error.errno not in OTHER_KIND | {errno.ENOENT}:
                raise
            raise CorruptCheckpoint(f"{path} is missing") from None
        if not stat.S_ISREG(info.st_mode):
            raise CorruptCheckpoint(f"{path} is not a regular file")
        if info.st_size != size:
            raise CorruptCheckpoint(f"{path} has {info.st_size:,} bytes, {size:,} were written")
    mine = share({path: size for path, (size, _) in recorded.files.items()}, rank, processes)
    try:
        read_back = digests(folder, mine)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise CorruptCheckpoint(f"the storage device reports an error: {error}") from error
    changed = [path for path in mine if read_back[path] != recorded.files[path]]
    if changed:
        raise CorruptCheckpoint(f"{changed[0]} was changed after it was written")
    return recorded


def _digest_of(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
