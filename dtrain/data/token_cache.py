"""Tokens of texts on disk: tokenised once, and held against their digest whenever they are opened."""

import fcntl
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from dtrain.core.errors import DataError, EnvironmentFault
from dtrain.data.files import expanded, replacing
from dtrain.data.known import seal, stamp, unsealed
from dtrain.data.stream import Stream


def cached(cache: str, name: str, make: Callable[[], Iterable[np.ndarray]]) -> Stream:
    """The tokens under that name; made where they are absent, damaged or cut. EnvironmentFault where they cannot be."""
    path = expanded(cache) / f"tokens-{name}.bin"
    found = _sound(path, cache)
    if found is None:
        try:
            with _alone(path):
                found = _sound(path, cache) or _made(path, cache, make())
        except OSError as error:
            hint = "set data.cache to a folder you may write"
            raise EnvironmentFault(f"cannot keep tokens: {error.filename or path}: {error.strerror}", hint) from error
    return found


def _sound(path: Path, cache: str) -> Stream | None:
    """The tokens, if they are those that were written."""
    about = unsealed(path.with_suffix(".json"))
    if about is None or not path.is_file():
        return None
    try:
        stream = Stream(path, about["dtype"], 0, about["count"], tuple(stamp(path)), derived=True)
        if stream.found[0] != len(stream) * np.dtype(stream.dtype).itemsize:
            return None
        return stream if stream.scanned(cache)["digest"] == about["digest"] else None
    except DataError:  # it cannot be read, or another process replaces it
        return None


def _made(path: Path, cache: str, parts: Iterable[np.ndarray]) -> Stream:
    digest, count, dtype = hashlib.sha256(), 0, "uint8"
    for place in (path, path.with_suffix(".json")):
        if place.is_dir():
            place.rmdir()
    with replacing(path) as file:
        for part in parts:
            written = np.ascontiguousarray(part)
            file.write(written.data)
            digest.update(written.data)
            count, dtype = count + len(part), part.dtype.str
    seal(path.with_suffix(".json"), {"dtype": dtype, "count": count, "digest": digest.hexdigest()})
    found = _sound(path, cache)
    if found is None:
        raise EnvironmentFault(
            f"{path}: reads otherwise than it was written", "the disk may be damaged: set data.cache"
        )
    return found


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of this machine at a time; the others find what it made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as lock:
        with suppress(OSError):  # not every network file system can; then each makes the same tokens
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
