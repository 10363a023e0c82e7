"""Tokens that follow each other in a file, mapped into memory when they are first read.

Two formats: .bin of whole numbers, with llm.c's header or none, and .npy. The header of llm.c: 256 32-bit integers,
of which the first says what follows, the third how many.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.files import reason, refuse_suffix
from dtrain.data.known import known, stamp
from dtrain.data.source import CHANGED

HEADERS = {20240520: "uint16", 20240801: "uint32"}
HEADER_VALUES = 256
NUMPY = b"\x93NUMPY"
SCAN = 2**24
"""Tokens read in one go for the digest, the smallest and the largest."""
_TEXT = "for text, set data.kind to text"
_PACKED = "unpack it first"
FORMATS = dict.fromkeys((".txt", ".md", ".jsonl", ".json", ".csv", ".tsv"), _TEXT) | {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z"), _PACKED),
    ".npz": "save the array alone: numpy.save('tokens.npy', tokens)",
    **dict.fromkeys((".parquet", ".arrow", ".idx", ".pt", ".safetensors"), "write the tokens to a .npy or a .bin"),
}


@dataclass(frozen=True)
class Stream:
    """A range of a file of tokens. It pickles as the place of the tokens, without the tokens."""

    path: Path
    dtype: str
    offset: int
    count: int
    found: tuple[int, ...]
    """Size, times of change and inode of the file when it was opened."""
    derived: bool = False
    """A cache whose name follows from its content: another file in its place holds the same tokens."""

    def __len__(self) -> int:
        return self.count

    def part(self, start: int, stop: int) -> "Stream":
        """The tokens `start` to `stop`."""
        offset = self.offset + start * np.dtype(self.dtype).itemsize
        return dataclasses.replace(self, offset=offset, count=stop - start)

    @cached_property
    def tokens(self) -> np.ndarray:
        """A plain array: a slice of np.memmap costs several times as much."""
        if not self.count:
            return np.empty(0, self.dtype)
        self.check()
        try:
            return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, (self.count,)))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: cannot be read: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}

    def changed(self) -> str:
        """How the file differs from what was opened; empty where it does not."""
        try:
            status = self.path.stat()
        except OSError as error:
            return "" if self.derived else f"{self.path}: cannot be read any more: {error.strerror}"
        size, mtime, _, inode = self.found
        if self.derived and status.st_ino != inode:
            return ""
        if status.st_size != size:
            return f"{self.path}: had {size:,} bytes when it was opened, now {status.st_size:,}"
        if status.st_mtime_ns != mtime:  # not the inode: some network file systems number inodes anew
            return f"{self.path}: was written to or replaced since it was opened"
        return ""

    def check(self) -> None:
        """DataError where the file changed: reading what was cut off would kill the process (SIGBUS)."""
        changed = self.changed()
        if changed:
            raise DataError(changed, CHANGED)

    def scanned(self, cache: str) -> dict[str, Any]:
        """Digest, smallest and largest of the tokens, from `cache` where the file has not changed since."""
        key = f"tokens {self.dtype} {self.offset} {self.count}"
        return known(cache, key, [self.path], lambda _: self._scan())[0]

    def _scan(self) -> dict[str, Any]:
        digest, least, most, left = hashlib.sha256(), [0], [0], self.count
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while left:
                part = np.fromfile(file, self.dtype, min(left, SCAN))
                if not len(part):
                    raise DataError(f"{self.path}: ends {left:,} tokens early")
                digest.update(part.data)
                least.append(int(part.min()))
                most.append(int(part.max()))
                left -= len(part)
        return {"digest": digest.hexdigest(), "smallest": min(least), "largest": max(most)}


def opened(path: Path, dtype: str) -> Stream:
    """The tokens of a .npy, or of a .bin of that dtype where no header names another; DataError says what is wrong."""
    refuse_suffix(path, "a file of tokens: .bin or .npy", FORMATS)
    found = stamp(path)
    try:
        with path.open("rb") as file:
            start = file.read(4 * HEADER_VALUES)
        numpy = path.suffix == ".npy" or start.startswith(NUMPY)
        dtype, offset, count = _npy(path) if numpy else _bin(start, dtype)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as tokens: {error}") from error
    size, width = found[0] - offset, np.dtype(dtype).itemsize
    if size % width:
        hint = "it was cut off, or it holds another dtype" + ("" if numpy else ": set data.dtype")
        raise DataError(f"{path}: {size:,} bytes are no whole number of {dtype}, {width} bytes each", hint)
    if count is not None and count != size // width:
        raise DataError(f"{path}: the header promises {count:,} tokens; {size // width:,} follow")
    if not size:
        raise DataError(f"{path}: holds no token")
    return Stream(path, dtype, offset, size // width, tuple(found))


def _bin(start: bytes, dtype: str) -> tuple[str, int, int | None]:
    """Dtype, where the tokens begin, and how many a header promises."""
    if len(start) == 4 * HEADER_VALUES:
        magic, _, count = np.frombuffer(start, "<i4", 3).tolist()
        if magic in HEADERS:
            return HEADERS[magic], 4 * HEADER_VALUES, count % 2**32
    return dtype, 0, None


def _npy(path: Path) -> tuple[str, int, int]:
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f".npy of version {version[0]}.{version[1]}; 1.0 and 2.0 are read")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            offset = file.tell()
    except OSError:
        raise
    except Exception as error:  # a damaged header is parsed as Python and raises what that may
        raise ValueError(reason(error)) from error
    if len(shape) != 1 or dtype.kind not in "ui":
        sizes = " x ".join(map(str, shape))
        raise DataError(f"{path}: holds {dtype} of {sizes}; tokens are whole numbers in one dim")
    return dtype.str, offset, shape[0]
