"""Files of tokens: .bin of whole numbers, with llm.c's header or none, and .npy; read as they are asked for.

The header of llm.c: 256 32-bit integers, of which the first says what follows, the third how many.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from dtrain.batch import Batch, Example
from dtrain.data.codec import Codec, codec
from dtrain.data.files import matching
from dtrain.data.source import Load, Source, Split
from dtrain.data.windows import Windows, row_example
from dtrain.errors import DataError
from dtrain.fields import Fraction, Natural, Positive

HEADERS = {20240520: "uint16", 20240801: "uint32"}
HEADER_VALUES = 256
DIGESTED = 2**24
SCAN = 2**24
"""Tokens looked at in one go for the largest."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Rows of tokens from files that hold nothing else."""

    kind: Literal["tokens"] = "tokens"
    files: tuple[str, ...]
    """Files or globs; each a stream of its own."""
    length: Positive
    """Tokens in a row."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Of a .bin without a header."""
    test: Fraction = 0.1
    """The part held out at the end of each file."""
    test_files: tuple[str, ...] = ()
    """Files held out, in place of a part of each."""
    random: bool = True
    """Rows begin anywhere, drawn anew for each; else each has its turn once in an epoch."""
    separator: Natural | None = None
    """The token that ends a document; given, no token sees another document's."""
    tokenizer: str | None = None
    """"bytes" or a tokenizer.json, for `dtrain generate`."""
    load: Load = field(default_factory=Load)

    @property
    def keyed(self) -> bool:
        return False

    def example(self) -> Example:
        return row_example(self.length, self.separator is not None)

    def open(self, split: Split) -> Source:
        names = self.test_files if split == "test" and self.test_files else self.files
        files = matching(names, "tokens")
        streams = [read(path, self.dtype) for path in files]
        if not self.test_files:
            streams = [held_out(stream, self.test, split) for stream in streams]
        return windows(
            [str(path) for path in files], streams, self.length, self.random and split == "train", self.separator, split
        )

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        return batch

    def codec(self) -> Codec:
        """How text becomes tokens and back."""
        return codec(self.tokenizer)


def read(path: Path, dtype: str) -> np.ndarray:
    """The tokens of a file, left on disk until asked for; DataError says what is wrong with it."""
    try:
        whole = path.suffix == ".npy"
        found = np.load(path, mmap_mode="r", allow_pickle=False) if whole else _read_bin(path, dtype)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as tokens: {error}") from error
    if found.ndim != 1 or found.dtype.kind not in "ui":
        shape = " x ".join(map(str, found.shape))
        raise DataError(f"{path}: holds {found.dtype} of {shape}; tokens are whole numbers in one dim")
    return found


def _read_bin(path: Path, dtype: str) -> np.ndarray:
    size = path.stat().st_size
    start = np.fromfile(path, np.int32, 3) if size >= 4 * HEADER_VALUES else np.zeros(3, np.int32)
    offset, count = 0, None
    if int(start[0]) in HEADERS:
        dtype, offset, count = HEADERS[int(start[0])], 4 * HEADER_VALUES, int(start[2])
    width = np.dtype(dtype).itemsize
    if (size - offset) % width:
        hint = "it was cut off, or it holds another dtype: set data.dtype"
        raise DataError(f"{path}: {size - offset:,} bytes are no whole number of {dtype}, {width} bytes each", hint)
    if count is not None and count != (size - offset) // width:
        raise DataError(f"{path}: the header promises {count:,} tokens; {(size - offset) // width:,} follow")
    if size == offset:
        raise DataError(f"{path}: holds no token")
    return np.memmap(path, dtype, "r", offset)


def held_out(stream: np.ndarray, test: float, split: Split) -> np.ndarray:
    """The part of a stream that a split has: the end of it is for testing."""
    cut = len(stream) - round(test * len(stream))
    return stream[:cut] if split == "train" else stream[cut:]


def windows(
    files: list[str], streams: list[np.ndarray], length: int, random: bool, separator: int | None, split: Split
) -> Windows:
    """Windows of the streams; DataError where none is long enough for a single one."""
    if not any(len(stream) > length for stream in streams):
        longest = max(len(stream) for stream in streams)
        hint = "shorten data.length" + (", or hold out more with data.test" if split == "test" else "")
        named = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        raise DataError(f"{named}: {longest:,} tokens to {split} on; a row takes {length} and one more", hint)
    least = min(int(stream[: 2**16].min()) for stream in streams if len(stream))
    if least < 0:
        raise DataError(f"{files[0]}: holds {least}; tokens are not below 0")
    largest = [
        max(int(stream[i : i + SCAN].max()) for i in range(0, len(stream), SCAN)) for stream in streams if len(stream)
    ]
    kept = [path for path, stream in zip(files, streams, strict=True) if len(stream)]
    return Windows(
        tuple(streams),
        length,
        random,
        separator,
        max(largest),
        kept[int(np.argmax(largest))],
        f"tokens:{split}:{length}:{random}:{separator}:{_digest(streams)}",
    )


def _digest(streams: list[np.ndarray]) -> str:
    """Of every token; of streams of more than DIGESTED tokens, of their number and of so many between."""
    found = hashlib.sha256()
    for stream in streams:
        found.update(f"{len(stream)}:".encode())
        step = max(1, len(stream) // DIGESTED)
        found.update(np.ascontiguousarray(stream[::step]).tobytes())
    return found.hexdigest()[:16]
