"""Read and replace files: atomically, only regular ones, and also on a full disk; let one process create a file."""

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from dtrain.core.errors import FULL, DataError, EnvironmentFault, RecipeError, cause
from dtrain.core.leftovers import part_of
from dtrain.core.types import JsonObject

POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a pointer of Git LFS."""
KINDS = (
    (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)  # fmt: skip


def refuse_other_kind(path: Path, *, file: bool) -> None:
    """EnvironmentFault if the path exists but is not a regular file (with `file`) or not a folder (without)."""
    hint = "move it away, or give this run another name: name=..."
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise EnvironmentFault(f"{path} is a link to {path.readlink()}, which does not exist", hint) from None
        return
    except OSError as error:
        raise EnvironmentFault(cause(error), hint) from error
    if not (stat.S_ISREG(mode) if file else stat.S_ISDIR(mode)):
        raise EnvironmentFault(f"{path} is {_kind(mode)}; a run needs a {'file' if file else 'folder'} there", hint)


def _kind(mode: int) -> str:
    return next((name for is_kind, name in KINDS if is_kind(mode)), "a file")


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file; OSError for any other kind, such as a FIFO, which would block."""
    with open_regular(path) as file:
        return file.read()


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; OSError for any other kind."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.ENXIO, f"{_kind(mode)}, not a file", str(path))
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def read_json(path: Path) -> Any:
    """The value in a JSON file; ValueError if it is not valid JSON, OSError if the file cannot be read."""
    try:
        return json.loads(read_regular(path))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_object(path: Path, what: str = "JSON") -> JsonObject:
    """The object in a JSON file that others wrote. DataError if it cannot be read, or if it has no object."""
    refuse_pointer(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors of Windows write a mark at the begin
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as {what}: {type(error).__name__} {error}"[:300]) from error
    if not isinstance(found, dict):
        raise DataError(f"{path} cannot be read as {what}: it has {type(found).__name__}, not an object")
    return found


def refuse_pointer(path: Path) -> None:
    """DataError if the file is a pointer of Git LFS, which stands where the content was not downloaded."""
    with suppress(OSError), open_regular(path) as file:
        if file.read(len(POINTER)) == POINTER:
            raise DataError(f"{path} is a pointer of Git LFS, not the file itself", "download it: git lfs pull")


def overwrite(path: Path, text: str) -> None:
    """Replace a file atomically, so that a reader never gets a partial file. OSError if it cannot be written."""
    part = path.with_suffix(f"{path.suffix}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)  # free its space: the disk may be full
        raise


def update(path: Path, text: str) -> None:
    """Like `overwrite`, but a full disk does not keep an existing file from being updated.

    The text is then written in place, into the blocks that the file has: for files that have a checksum, since a reader
    may get a partial one. OSError if it cannot be written; the file is then unchanged.
    """
    try:
        overwrite(path, text)
    except OSError as error:
        if error.errno not in FULL or not path.is_file():
            raise
        data = text.encode()
        with path.open("r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_blocks * 512 < len(data):  # POSIX counts in units of 512 bytes
                raise
            file.write(data)
            file.truncate()


@contextmanager
def atomic_write(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that atomically replaces `path` at the end; with `sync`, after an fsync. Raises OSError.

    Those that killed processes of this host left behind are removed.
    """
    with part_of(path) as (part, file):
        try:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
    if sync:
        _sync_folder(path.parent)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Allow one process of this host at a time to create a file; the others then use what it created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as lock:
        with suppress(OSError):  # not every network file system supports locks; then each process writes equal files
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every file system supports this
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@cache
def code_digest() -> str:
    """The digest of dtrain's Python files."""
    return digest(*sorted(Path(__file__).parents[1].rglob("*.py")))


def digest(*paths: Path) -> str:
    """The digest of the contents of files, one after the other."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]


def create(path: Path, text: str, hint: str = "name another file") -> None:
    """Write a file that does not exist yet. RecipeError with the hint if it does, DataError if the text is not UTF-8,
    EnvironmentFault if it cannot be written."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{path.name}: a name in it is not UTF-8", "rename that file or folder") from error
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        raise RecipeError(f"{path} already exists", hint) from None
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from error
