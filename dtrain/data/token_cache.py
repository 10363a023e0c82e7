"""Cache of tokenised text on disk; a file is verified against its digest whenever it is opened."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from dtrain.core.errors import DataError, EnvironmentFault
from dtrain.data.files import expanded, locked, replacing
from dtrain.data.known import seal, stamp, unsealed
from dtrain.data.stream import Stream


def cached(cache: str, name: str, make: Callable[[], Iterable[np.ndarray]]) -> Stream:
    """The cached tokens with that name; created with `make` if they are missing or damaged.

    EnvironmentFault if the cache folder cannot be written.
    """
    path = cache_file(cache, name)
    stream = _verified(path, cache)
    if stream is None:
        try:
            with locked(path):
                stream = _verified(path, cache) or _create(path, cache, make())
        except OSError as error:
            hint = "set data.cache to a folder that you can write to"
            message = f"cannot write the token cache: {error.filename or path}: {error.strerror}"
            raise EnvironmentFault(message, hint) from error
    return stream


def cache_file(cache: str, name: str) -> Path:
    """The path of the cached tokens with that name."""
    return expanded(cache) / f"tokens-{name}.bin"


def _verified(path: Path, cache: str) -> Stream | None:
    """The cached tokens if their size and digest are as written, else None."""
    metadata = unsealed(path.with_suffix(".json"))
    if metadata is None or not path.is_file():
        return None
    try:
        stream = Stream(path, metadata["dtype"], 0, metadata["count"], tuple(stamp(path)), derived=True)
        if stream.found[0] != len(stream) * np.dtype(stream.dtype).itemsize:
            return None
        return stream if stream.scanned(cache)["digest"] == metadata["digest"] else None
    except DataError:  # unreadable, or being replaced by another process
        return None


def _create(path: Path, cache: str, parts: Iterable[np.ndarray]) -> Stream:
    digest, count, dtype = hashlib.sha256(), 0, "uint8"
    for obstacle in (path, path.with_suffix(".json")):
        if obstacle.is_dir():
            obstacle.rmdir()
    with replacing(path) as file:
        for part in parts:
            written = np.ascontiguousarray(part)
            file.write(written.data)
            digest.update(written.data)
            count, dtype = count + len(part), part.dtype.str
    seal(path.with_suffix(".json"), {"dtype": dtype, "count": count, "digest": digest.hexdigest()})
    stream = _verified(path, cache)
    if stream is None:
        message = f"{path}: its content differs from what was written"
        raise EnvironmentFault(message, "the disk may be damaged: set data.cache to a folder on another disk")
    return stream
