"""The files that names and globs stand for, and files that are replaced in one step."""

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dtrain.core.errors import DataError

PACKAGE = "{dtrain}"
"""Stands for the folder in which dtrain itself is installed."""


def expanded(name: str) -> Path:
    """The path of a name in a recipe: {dtrain} and ~ replaced; DataError where it can be none."""
    try:
        path = Path(name.replace(PACKAGE, str(Path(__file__).parents[1]))).expanduser()
    except RuntimeError as error:
        raise DataError(f"{name}: this machine has no such user", "write the path out, or ~/ for your own") from error
    if "\0" in name:
        raise DataError(f"{name!r} is no path: it holds a NUL")
    return path


def matching(names: tuple[str, ...], what: str) -> list[Path]:
    """Every file that is named, in the order of the names and sorted within each; DataError names what is missing."""
    found: list[Path] = []
    for name in names:
        path = expanded(name)
        matched = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207
        matched = [path for path in matched if path.is_file()]
        if not matched:
            hint = "paths are relative to the recipe, else to the working folder; ** stands for any folders"
            raise DataError(f"no file of {what} matches {name}", hint)
        found += [path for path in matched if path not in found]
    if not found:
        raise DataError(f"data.files names no file of {what}")
    return found


def refuse_suffix(path: Path, what: str, formats: dict[str, str]) -> None:
    """DataError where the name of a file says that it is of another format; the hint says what to do."""
    hint = formats.get(path.suffix.lower())
    if hint is not None:
        raise DataError(f"{path}: {path.suffix} is not {what}", hint)


def reason(error: BaseException) -> str:
    """What a library reports, in one short line: it may quote the damaged bytes."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """A file that replaces `path` in one step; with `sync`, once all of it is on disk. Raises OSError."""
    part = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
        if sync:
            _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every file system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
