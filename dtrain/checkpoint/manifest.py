"""What a checkpoint says of itself, written last: every file with its size and digest, and how the state came to be."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtrain.core.errors import OTHER_KIND
from dtrain.core.run_dir import MANIFEST as NAME
from dtrain.core.run_dir import read_json

FORMAT = 1


class CorruptCheckpoint(Exception):
    """A checkpoint is not what its manifest says, or has none; the text says how."""


@dataclass(frozen=True)
class Manifest:
    """A committed step."""

    step: int
    about: Mapping[str, Any]
    """Recipe, data, topology, versions, examples: plain values."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    checksum: Sequence[int] = ()
    """Of the state's bits, as computed on the devices; () where none was."""
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Bytes and SHA-256 of every file, by its path inside the checkpoint."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Put it into the folder in one step, on disk when this returns. A file is renamed, never a folder: on a
        bucket that is one object, which is there whole or not at all."""
        values = asdict(self)
        values["sha256"] = _digest_of(values)
        part = folder / f"{NAME}.part"
        with part.open("w") as file:
            json.dump(values, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / NAME)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Unsound where it is missing or damaged itself; OSError where the machine,
    and not the checkpoint, is at fault."""
    try:
        values = read_json(folder / NAME)
        digest = values.pop("sha256")
        if _digest_of(values) != digest:
            raise CorruptCheckpoint("its manifest was changed after it was written")
        files = {path: (int(size), str(digest)) for path, (size, digest) in values["files"].items()}
        found = Manifest(**values | {"files": files})
    except FileNotFoundError:
        raise CorruptCheckpoint("it has no manifest: its save was never finished") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CorruptCheckpoint(f"its manifest cannot be read: {error}") from error
    except OSError as error:
        if error.errno not in OTHER_KIND:
            raise
        raise CorruptCheckpoint(f"its manifest cannot be read: {error.strerror}") from error
    if found.format != FORMAT:
        raise CorruptCheckpoint(f"its manifest has format {found.format}; this dtrain reads {FORMAT}")
    if str(found.step) != folder.name and folder.name.isdecimal():
        raise CorruptCheckpoint(
            f"it holds step {found.step}, renamed or copied; under the name {found.step} it can be used"
        )
    return found


def files_of(folder: Path) -> dict[str, int]:
    """Bytes of every file under a checkpoint, its manifest left out, by its path inside."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / NAME)
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}


def share(files: Mapping[str, int], rank: int, processes: int) -> list[str]:
    """The files that one of several processes digests: about as many bytes as each other's."""
    return sorted(files, key=lambda path: (-files[path], path))[rank::processes]


def digests(folder: Path, paths: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Bytes and SHA-256 of some of a checkpoint's files."""
    found = {}
    for path in paths:
        with (folder / path).open("rb") as file:
            found[path] = (os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
    return found


def check(folder: Path, rank: int, processes: int) -> Manifest:
    """The manifest, once sizes of all files and the digests of this process's share were found to be as it says.

    Unsound where they are not; OSError where the machine, and not the checkpoint, is at fault.
    """
    recorded = read(folder)
    for path, (size, _) in recorded.files.items():
        try:
            found = (folder / path).stat()
        except OSError as error:
            if error.errno not in OTHER_KIND | {errno.ENOENT}:
                raise
            raise CorruptCheckpoint(f"{path} is missing") from None
        if not stat.S_ISREG(found.st_mode):
            raise CorruptCheckpoint(f"{path} is no file")
        if found.st_size != size:
            raise CorruptCheckpoint(f"{path} has {found.st_size:,} bytes, {size:,} were written")
    mine = share({path: size for path, (size, _) in recorded.files.items()}, rank, processes)
    try:
        read_back = digests(folder, mine)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise CorruptCheckpoint(f"its medium fails: {error}") from error
    changed = [path for path in mine if read_back[path] != recorded.files[path]]
    if changed:
        raise CorruptCheckpoint(f"{changed[0]} was changed after it was written")
    return recorded


def _digest_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
