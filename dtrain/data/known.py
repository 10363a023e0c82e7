"""What reading whole files gave, kept so that the next start need not read them again.

A record holds for a file of the same size, times and inode. It carries its own digest: one that is damaged or cut
counts as absent. Without a folder to write to, files are read at every start.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError
from dtrain.data.files import expanded, replacing

FRESH_NS = 2 * 10**9
"""No record is kept of a file that changed so recently: it may change again within one tick of its times."""
CHUNK = 2**20
NO_CACHE = ""
"""In place of a folder: nothing is kept."""


def stamp(path: Path) -> list[int]:
    """Size, times of change and inode; DataError where there is no such file."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def known(cache: str, key: str, paths: Sequence[Path], read: Callable[[Path], Any]) -> list[Any]:
    """What `read` gives for each file, as JSON; it is called for files that changed since, or are new.

    Raises DataError where a file cannot be read or changes meanwhile.
    """
    names = [os.path.abspath(path) for path in paths]  # noqa: PTH100 (resolves no link)
    if cache == NO_CACHE:
        return [_read_whole(path, read)[0] for path in paths]
    record = expanded(cache) / "known" / f"{_digest(repr((1, key, names)))[:24]}.json"
    old, new, found, now = unsealed(record) or {}, {}, [], time.time_ns()
    for name, path in zip(names, paths, strict=True):
        before = stamp(path)
        if name in old and old[name]["stamp"] == before:
            value = old[name]["value"]
        else:
            value, before = _read_whole(path, read)
        found.append(value)
        if now - max(before[1:3]) > FRESH_NS:
            new[name] = {"stamp": before, "value": value}
    if new != old:
        with suppress(OSError):  # it only saves time
            seal(record, new, sync=False)
    return found


def _read_whole(path: Path, read: Callable[[Path], Any]) -> tuple[Any, list[int]]:
    """What `read` gives, and the stamp of the file, which did not change meanwhile."""
    before = stamp(path)
    try:
        value = read(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if stamp(path) != before:
        raise DataError(f"{path}: changed while it was read", "start again when nothing writes to it")
    return value, before


def file_digest(path: Path) -> str:
    """SHA-256 of the bytes of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            found.update(part)
    return found.hexdigest()


def seal(path: Path, content: Any, sync: bool = True) -> None:
    """Write JSON under its own digest. Raises OSError."""
    body = json.dumps(content)
    with replacing(path, sync) as file:
        file.write(f"{_digest(body)}\n{body}".encode())


def unsealed(path: Path) -> Any:
    """The content of such a file; None where there is none, or it is damaged."""
    try:
        digest, body = path.read_bytes().decode().split("\n", 1)
    except (OSError, ValueError):
        return None
    return json.loads(body) if digest == _digest(body) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
