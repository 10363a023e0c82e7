"""A cache of results computed from whole files, such as digests, so that later starts need not read the files again.

A record is valid while the file has the same size and times; inodes differ with each mount of a bucket. It contains its
own digest: a damaged or truncated record counts as absent. Hosts may share the folder. Without a writable cache folder,
the files are read at every start.
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
from dtrain.core.files import atomic_write
from dtrain.data.paths import expand_path

FRESH_NS = 2 * 10**9
"""Nanoseconds. A file changed more recently is not cached: a further change might not alter its coarse timestamps."""
CHUNK = 2**20
TIMES = 3
"""How much of a file's stamp a record has: the size and two times."""
NO_CACHE = ""
"""Value in place of a cache folder: nothing is cached."""


def file_stamp(path: Path) -> list[int]:
    """Size, modification time, status change time and inode of a file; DataError if there is no such file."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def cached_by_file(cache: str, key: str, paths: Sequence[Path], read: Callable[[Path], Any]) -> list[Any]:
    """The result of `read` for each file, from the cache if the file has not changed; results must be JSON values.

    `key` names the computation. DataError if a file cannot be read or changes while it is read.
    """
    names = [os.path.abspath(path) for path in paths]  # noqa: PTH100 (resolves no link)
    if cache == NO_CACHE:
        return [_read_whole(path, read)[0] for path in paths]
    record = expand_path(cache) / "known" / f"{_digest(repr((1, key, names)))[:24]}.json"
    old, new, results, now = read_sealed(record) or {}, {}, [], time.time_ns()
    for name, path in zip(names, paths, strict=True):
        before = file_stamp(path)[:TIMES]
        if name in old and old[name]["stamp"] == before:
            value = old[name]["value"]
        else:
            value, before = _read_whole(path, read)
        results.append(value)
        if now - max(before[1:3]) > FRESH_NS:
            new[name] = {"stamp": before, "value": value}
    if new != old:
        with suppress(OSError):  # the cache only saves time
            write_sealed(record, new, sync=False)
    return results


def _read_whole(path: Path, read: Callable[[Path], object]) -> tuple[object, list[int]]:
    """The result of `read`, and size and times of the file; DataError if the file changes while it is read."""
    before = file_stamp(path)[:TIMES]
    try:
        value = read(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if file_stamp(path)[:TIMES] != before:
        hint = "run the same command again when no other program writes to the file"
        raise DataError(f"{path}: changed while it was read", hint)
    return value, before


def file_digest(path: Path) -> str:
    """SHA-256 of the bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            digest.update(part)
    return digest.hexdigest()


def write_sealed(path: Path, content: object, sync: bool = True) -> None:
    """Write a JSON value preceded by its digest. Raises OSError."""
    body = json.dumps(content)
    with atomic_write(path, sync) as file:
        file.write(f"{_digest(body)}\n{body}".encode())


def read_sealed(path: Path) -> Any:
    """Read a value written by `write_sealed`; None if the file is missing or damaged."""
    try:
        digest, body = path.read_bytes().decode().split("\n", 1)
    except (OSError, ValueError):
        return None
    return json.loads(body) if digest == _digest(body) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
