"""Resolve file names and globs of a recipe, and replace files atomically."""

import fcntl
import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dtrain.core.errors import DataError, DtrainError, missing_package
from dtrain.core.leftovers import part_of

PACKAGE = "{dtrain}"
"""Placeholder for the folder of the installed dtrain package."""


def expanded(name: str) -> Path:
    """The path for a name in a recipe, with {dtrain} and ~ replaced; DataError if it is not a valid path."""
    try:
        path = Path(name.replace(PACKAGE, str(Path(__file__).parents[1]))).expanduser()
    except RuntimeError as error:
        hint = "write the full path, or ~/ for your own home folder"
        raise DataError(f"{name}: this machine has no such user", hint) from error
    if "\0" in name:
        raise DataError(f"{name!r} is not a valid path: it contains a NUL character")
    return path


HERE = "a relative path starts at the current folder; ** matches any folders"
"""For files that are named on the command line."""
RELATIVE = "a relative path starts at the recipe's folder or the current folder; ** matches any folders"
"""For files that a recipe names."""


CACHE = "~/.cache/dtrain"
"""Default folder for copies, tokens and digests of files."""


def is_remote(name: str) -> bool:
    """Whether a name is an address in object storage, such as gs://bucket/file."""
    return bool(re.match(r"[a-z][a-z0-9+.-]*://", name))


def matching(names: tuple[str, ...], what: str, hint: str = RELATIVE, cache: str = CACHE) -> list[Path]:
    """All files that match the names or globs, in the order of the names and sorted within each, without duplicates.

    Of files in object storage, their copies in `cache`. `what` describes their content for messages. DataError if a
    name matches no file.
    """
    files: list[Path] = []
    for name in names:
        if is_remote(name):
            from dtrain.data.remote import fetched

            files += [path for path in fetched(name, what, cache) if path not in files]
            continue
        path = expanded(name)
        matched = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207
        matched = [path for path in matched if path.is_file()]
        if not matched:
            raise DataError(f"no file of {what} matches {name}", hint)
        files += [path for path in matched if path not in files]
    if not files:
        raise DataError(f"data.files is empty: it must name at least one file of {what}")
    return files


def refuse_suffix(path: Path, what: str, formats: dict[str, str]) -> None:
    """DataError if the suffix of a file belongs to another format; `formats` maps such suffixes to hints."""
    hint = formats.get(path.suffix.lower())
    if hint is not None:
        raise DataError(f"{path}: {path.suffix} is not {what}", hint)


def reason(error: BaseException) -> str:
    """The first line of a library's error, shortened because it may quote damaged bytes."""
    line = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    return re.sub(r" <[\w.]+ object at 0x[0-9a-f]+>", " it", line)[:200]


@contextmanager
def reading(where: str | Path, hint: str = "") -> Iterator[None]:
    """Within this context, every exception of a library that reads bytes of others becomes a DataError with the place.

    Libraries raise many classes of exceptions on damaged or hostile bytes, and new versions raise others.
    """
    try:
        yield
    except DtrainError:
        raise
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    except MemoryError as error:
        raise DataError(f"{where}: needs more memory than there is", hint) from error
    except Exception as error:
        raise DataError(f"{where}: cannot be read: {reason(error)}", hint) from error


@contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
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
def locked(path: Path) -> Iterator[None]:
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
