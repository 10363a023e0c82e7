"""A file of tokens, mapped into memory when it is first read.

Two formats: .bin with unsigned integers, with or without the header of llm.c, and .npy. The header of llm.c has 256
32-bit integers: the first is a magic number that determines the dtype, the third the number of tokens.
"""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject
from dtrain.data.digest_cache import cached_by_file, file_stamp
from dtrain.data.paths import reason, refuse_suffix
from dtrain.data.source import CHANGED

HEADERS = {20240520: "uint16", 20240801: "uint32"}
"""Dtype of the tokens by the magic number of the header."""
HEADER_VALUES = 256
MEGATRON = b"MMIDIDX\x00\x00"
"""First bytes of an index of Megatron's; eight bytes of version and a code of the dtype follow."""
MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
WIDTH_SAMPLE = 256
"""First values of a .bin file that are looked at for the width of its tokens."""
FEW_VALUES = 32
"""Fewest values from which the width of tokens is determined."""
GZIP = b"\x1f\x8b\x08"
NUMPY = b"\x93NUMPY"
"""First bytes of a .npy file."""
SCAN = 2**24
"""Tokens per read when the digest, minimum and maximum are computed."""
_TEXT = "for text, set data.kind to text"
_PACKED = "unpack it first"
FORMATS = dict.fromkeys((".txt", ".md", ".jsonl", ".json", ".csv", ".tsv"), _TEXT) | {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z"), _PACKED),
    ".npz": "save the array as .npy: numpy.save('tokens.npy', tokens)",
    **dict.fromkeys((".parquet", ".arrow", ".idx", ".pt", ".safetensors"), "write the tokens to a .npy or .bin file"),
}


Part = np.ndarray | JsonObject
"""A part of what a cache keeps: tokens, or, after them, the account of what they were read from."""


@dataclass(frozen=True)
class Stream:
    """A range of tokens in a file. Pickling keeps the location of the tokens, not the tokens."""

    path: Path
    dtype: str
    offset: int
    """Byte offset of the first token in the file."""
    count: int
    """Number of tokens."""
    found: tuple[int, ...]
    """Size, modification time, status change time and inode of the file when it was opened."""
    derived: bool = False
    """Whether the file is a cache named by a hash of its content: a replacement has the same tokens."""
    account: JsonObject = field(default_factory=dict, compare=False)
    """What was met in the files that the tokens of a cache were made of."""

    def __len__(self) -> int:
        return self.count

    def part(self, start: int, stop: int) -> "Stream":
        """The tokens `start` to `stop` - 1 of this stream."""
        offset = self.offset + start * np.dtype(self.dtype).itemsize
        return dataclasses.replace(self, offset=offset, count=stop - start)

    @cached_property
    def tokens(self) -> np.ndarray:
        """The tokens as a plain array on the mapped file; a slice of np.memmap takes several times as long."""
        if not self.count:
            return np.empty(0, self.dtype)
        self.check()
        try:
            return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, (self.count,)))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: cannot be read: {error}") from error

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}

    def changed(self) -> str:
        """How the file changed after it was opened; empty if it did not."""
        try:
            status = self.path.stat()
        except OSError as error:
            return "" if self.derived else f"{self.path}: can no longer be read: {error.strerror}"
        size, mtime, _, inode = self.found
        if self.derived and status.st_ino != inode:
            return ""
        if status.st_size != size:
            return f"{self.path}: had {size:,} bytes when it was opened, now {status.st_size:,}"
        if status.st_mtime_ns != mtime:  # the inode is not compared: it is not stable on some network file systems
            return f"{self.path}: was modified or replaced after it was opened"
        return ""

    def check(self) -> None:
        """DataError if the file changed: reading beyond the end of a mapped file kills the process (SIGBUS)."""
        changed = self.changed()
        if changed:
            raise DataError(changed, CHANGED)

    def scanned(self, cache: str) -> dict[str, Any]:
        """`digest`, `smallest` and `largest` of the tokens, from the cache folder if the file has not changed."""
        key = f"tokens {self.dtype} {self.offset} {self.count}"
        return cached_by_file(cache, key, [self.path], lambda _: self._scan())[0]

    def _scan(self) -> dict[str, object]:
        digest, minima, maxima, left = hashlib.sha256(), [0], [0], self.count
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while left:
                part = np.fromfile(file, self.dtype, min(left, SCAN))
                if not len(part):
                    raise DataError(f"{self.path}: ends {left:,} tokens early")
                digest.update(part.data)
                minima.append(int(part.min()))
                maxima.append(int(part.max()))
                left -= len(part)
        return {"digest": digest.hexdigest(), "smallest": min(minima), "largest": max(maxima)}


@dataclass(frozen=True)
class InMemory:
    """A `Stream` of tokens in memory."""

    tokens: np.ndarray
    account: JsonObject = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> "InMemory":
        return InMemory(self.tokens[start:stop], self.account)

    def check(self) -> None:
        """Nothing to check: no file is read."""

    def changed(self) -> str:
        return ""

    def scanned(self, _: str) -> dict[str, Any]:
        return {"digest": "", "smallest": 0, "largest": int(self.tokens.max(initial=0))}


def opened(path: Path, dtype: str) -> Stream:
    """Open a .npy or .bin file of tokens; `dtype` is that of a .bin without a header. DataError if it is not valid."""
    refuse_suffix(path, "a file of tokens (.bin or .npy)", FORMATS)
    stamp = file_stamp(path)
    try:
        with path.open("rb") as file:
            start = file.read(4 * HEADER_VALUES)
        if start.startswith(GZIP):
            raise DataError(f"{path}: is compressed by gzip", _PACKED)
        numpy = path.suffix == ".npy" or start.startswith(NUMPY)
        dtype, offset, count = _npy(path) if numpy else _bin(start, _indexed(path) or dtype)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as tokens: {error}") from error
    size, width = stamp[0] - offset, np.dtype(dtype).itemsize
    if size % width:
        hint = "the file is truncated, or it has another dtype" + ("" if numpy else ": set data.dtype")
        raise DataError(f"{path}: {size:,} bytes are not a multiple of the {width} bytes of {dtype}", hint)
    if count is not None and count != size // width:
        raise DataError(f"{path}: the header declares {count:,} tokens, but {size // width:,} follow")
    if not size:
        raise DataError(f"{path}: contains no tokens")
    if not numpy and count is None:
        _refuse_wider(path, dtype)
    return Stream(path, dtype, offset, size // width, tuple(stamp))


def _indexed(path: Path) -> str:
    """The dtype in Megatron's index beside a .bin file; empty if there is no such index."""
    index = path.with_suffix(".idx")
    if not index.is_file():
        return ""
    with index.open("rb") as file:
        start = file.read(len(MEGATRON) + 9)
    code = start[len(MEGATRON) + 8 : len(MEGATRON) + 9]
    if not start.startswith(MEGATRON) or not code or code[0] not in MEGATRON_TYPES:
        message = f"{index}: is beside {path.name}, and is no index of tokens by Megatron"
        raise DataError(message, "rename it if it is something else, or write the tokens to a .npy file")
    return MEGATRON_TYPES[code[0]]


def _refuse_wider(path: Path, dtype: str) -> None:
    """DataError if the values are surely wider than the dtype: then every second one is the upper half of another."""
    values = np.fromfile(path, dtype, WIDTH_SAMPLE)
    if len(values) >= FEW_VALUES and not values[1::2].any() and values[::2].astype(bool).mean() > 0.2:
        wider = {"uint8": "uint16", "uint16": "uint32"}.get(dtype, "int64")
        message = f"{path}: every second value of the first {len(values):,} is 0: its tokens are wider than {dtype}"
        hint = f"set data.dtype: {wider}" if wider != "int64" else "write the tokens to a .npy file"
        raise DataError(message, hint)


def _bin(start: bytes, dtype: str) -> tuple[str, int, int | None]:
    """Dtype, byte offset of the first token, and the number of tokens in the header; None without a header."""
    if len(start) == 4 * HEADER_VALUES:
        magic, _, count = np.frombuffer(start, "<i4", 3).tolist()
        if magic in HEADERS:
            return HEADERS[magic], 4 * HEADER_VALUES, count % 2**32
    return dtype, 0, None


def _npy(path: Path) -> tuple[str, int, int]:
    """Dtype, byte offset of the first token, and number of tokens."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f".npy of version {version[0]}.{version[1]}; 1.0 and 2.0 are supported")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            offset = file.tell()
    except OSError:
        raise
    except Exception as error:  # the header is a Python literal; a damaged one raises errors of many classes
        raise ValueError(reason(error)) from error
    if len(shape) != 1 or dtype.kind not in "ui":
        sizes = " x ".join(map(str, shape)) or "()"
        raise DataError(f"{path}: the array is {dtype} of shape {sizes}; tokens must be integers in one dim")
    return dtype.str, offset, shape[0]
