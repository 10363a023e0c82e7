"""Rows from files of tokens."""

import hashlib
from dataclasses import dataclass, field
from typing import Literal

import jax

from dtrain.core.errors import DataError
from dtrain.core.types import Fraction, Natural, Positive
from dtrain.data.batch import Batch, Example
from dtrain.data.codec import Codec, codec
from dtrain.data.files import matching
from dtrain.data.source import Load, Source, Split
from dtrain.data.stream import Stream, opened
from dtrain.data.windows import Windows, row_example

LARGEST = 2**31 - 1
"""Rows hold 32-bit integers."""


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
    cache: str = "~/.cache/dtrain"
    """Where digests of files are kept, so that a file is read whole but once."""
    load: Load = field(default_factory=Load)

    @property
    def keyed(self) -> bool:
        return False

    def example(self) -> Example:
        return row_example(self.length, self.separator is not None)

    def open(self, split: Split) -> Source:
        names = self.test_files if split == "test" and self.test_files else self.files
        files = matching(names, "tokens")
        streams = [opened(path, self.dtype) for path in files]
        if not self.test_files:
            streams = [held_out(stream, self.test, split) for stream in streams]
        named = [str(path) for path in files]
        random = self.random and split == "train"
        return windows(named, streams, self.length, random, self.separator, split, self.cache)

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        return batch

    def codec(self) -> Codec:
        """How text becomes tokens and back."""
        return codec(self.tokenizer)


def held_out(stream: Stream, test: float, split: Split) -> Stream:
    """The part of a stream that a split has: the end of it is for testing."""
    cut = len(stream) - round(test * len(stream))
    return stream.part(0, cut) if split == "train" else stream.part(cut, len(stream))


def windows(
    files: list[str],
    streams: list[Stream],
    length: int,
    random: bool,
    separator: int | None,
    split: Split,
    cache: str,
) -> Windows:
    """Windows of the streams; DataError where none is long enough for a single one, or a token is out of range."""
    if not any(len(stream) > length for stream in streams):
        longest = max(len(stream) for stream in streams)
        hint = "shorten data.length" + (", or hold out more with data.test" if split == "test" else "")
        named = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        raise DataError(f"{named}: {longest:,} tokens to {split} on; a row takes {length} and one more", hint)
    largest, origin, digest = -1, "", hashlib.sha256()
    for file, stream in zip(files, streams, strict=True):
        scan = stream.scanned(cache)
        if scan["smallest"] < 0:
            raise DataError(f"{file}: holds {scan['smallest']}; tokens are not below 0")
        if scan["largest"] > LARGEST:
            raise DataError(f"{file}: holds {scan['largest']:,}; tokens are at most {LARGEST:,}")
        if scan["largest"] > largest:
            largest, origin = scan["largest"], file
        digest.update(f"{len(stream)}:{scan['digest']}".encode())
    fingerprint = f"tokens:{split}:{length}:{random}:{separator}:{digest.hexdigest()[:16]}"
    return Windows(tuple(streams), length, random, separator, largest, origin, fingerprint)
