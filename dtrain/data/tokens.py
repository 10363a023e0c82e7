"""Rows of tokens from files of tokens."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from random import sample
from typing import Any, ClassVar, Literal

import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import Fraction, Natural, Positive
from dtrain.data.batch import Example
from dtrain.data.data_check import BYTES, DataCheck
from dtrain.data.digest_cache import NO_CACHE
from dtrain.data.files import address_packages, resolve_files
from dtrain.data.source import Load, Source, Split, Unaugmented
from dtrain.data.stream import Stream, opened
from dtrain.data.tokenizer import Tokenizer, open_tokenizer
from dtrain.data.windows import Windows, row_example

LARGEST = 2**31 - 1
"""The largest supported token, because rows are 32-bit integers."""
READERS = 16
"""Most files that are read at a time for their digests."""


@dataclass(frozen=True, kw_only=True)
class Tokens(Unaugmented):
    """Rows of tokens from .bin or .npy files of tokens."""

    keeps: ClassVar[str] = "digests of the files"
    kind: Literal["tokens"] = "tokens"
    files: tuple[str, ...]
    """Files or globs; no row crosses from one file to another."""
    length: Positive
    """Tokens per row."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Dtype of a .bin file without a header."""
    test: Fraction = 0.1
    """Fraction of each file, at its end, that is held out for testing."""
    test_files: tuple[str, ...] = ()
    """Files for testing; if set, no part of `files` is held out."""
    random: bool = False
    """The files are cut into consecutive rows, each used once per epoch, in a random order; if true, training rows
    start at random positions, with replacement: in as many rows as an epoch has, 37% of the tokens never occur."""
    separator: Natural | None = None
    """The token that ends a document; if set, tokens attend only to tokens of the same document."""
    tokenizer: str | None = None
    """"bytes", or the path of a tokenizer.json or of a folder that contains one; used by `dtrain generate`."""
    cache: str = "~/.cache/dtrain"
    """Folder in which digests of the files are cached, so that later starts need not read every file."""
    load: Load = field(default_factory=Load)

    @property
    def tokenized(self) -> bool:
        return True

    @property
    def token_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def ends_texts(self) -> bool:
        return self.separator is not None

    @property
    def packages(self) -> tuple[str, ...]:
        return address_packages((*self.files, *self.test_files))

    def example(self) -> Example:
        return row_example(self.length, self.separator is not None)

    def open(self, split: Split) -> Source:
        names = self.test_files if split == "test" and self.test_files else self.files
        files = resolve_files(names, "tokens", cache=self.cache)
        streams = [opened(path, self.dtype) for path in files]
        if not self.test_files:
            streams = [held_out(stream, self.test, split) for stream in streams]
        labels = [str(path) for path in files]
        random = self.random and split == "train"
        return windows(
            labels, streams, self.length, random=random, separator=self.separator, split=split, cache=self.cache
        )

    def too_narrow(self, vocab: int) -> Iterator[tuple[str, str]]:
        most = int(np.iinfo(self.dtype).max) + 1
        if vocab > most and any(name.endswith(".bin") for name in (*self.files, *self.test_files)):
            yield "dtype", f"{self.dtype} holds tokens below {most:,}, and the model's vocab is {vocab:,}"

    def in_order(self) -> "Tokens":
        return replace(self, random=False)

    def without_cache(self) -> "Tokens":
        return replace(self, cache=NO_CACHE)

    def inspect(self, check: DataCheck) -> None:
        files = check.files(self.files, self.test_files, "tokens")
        if self.tokenizer:
            check.tokenizer(self)
        if check.too_large(f"the tokens of {len(files)} files", files, BYTES):
            check.examples["train"] = self.example()
        elif files:
            check.open(self, "data.files")

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer; DataError if `tokenizer` is not set or does not exist."""
        return open_tokenizer(self.tokenizer)


def held_out(stream: Stream, test: float, split: Split) -> Stream:
    """The part of a stream that belongs to a split: the fraction `test` at the end is the test split."""
    cut = len(stream) - round(test * len(stream))
    return stream.part(0, cut) if split == "train" else stream.part(cut, len(stream))


def _scanned(streams: Sequence[Stream], cache: str) -> list[dict[str, Any]]:
    """The digest and the range of the tokens of each stream.

    Files are read several at a time, in a random order: hosts that share the cache folder read different files first,
    and find there what the others have read.
    """
    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:
        reading = {
            number: pool.submit(streams[number].scanned, cache) for number in sample(range(len(streams)), len(streams))
        }
        try:
            return [reading[number].result() for number in range(len(streams))]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def windows(
    files: list[str],
    streams: list[Stream],
    length: int,
    random: bool,
    separator: int | None,
    split: Split,
    cache: str,
) -> Windows:
    """The windows of the streams, after a check of their length and tokens.

    `files` are the names of the streams for messages. DataError if no stream is long enough for one window, or if a
    token is out of range.
    """
    if not any(len(stream) > length for stream in streams):
        longest = max(len(stream) for stream in streams)
        hint = "lower data.length" + (", or raise data.test to hold out more" if split == "test" else "")
        label = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        message = f"{label}: too short for one row: {longest:,} tokens in the {split} split, a row needs {length + 1:,}"
        raise DataError(message, f"{hint} (a row is data.length tokens and one more as the last target)")
    largest, origin, digest = -1, "", hashlib.sha256()
    for file, stream, scan in zip(files, streams, _scanned(streams, cache), strict=True):
        if scan["smallest"] < 0:
            raise DataError(f"{file}: contains the token {scan['smallest']:,}; the minimum is 0")
        if scan["largest"] > LARGEST:
            raise DataError(f"{file}: contains the token {scan['largest']:,}; the maximum is {LARGEST:,}")
        if scan["largest"] > largest:
            largest, origin = scan["largest"], file
        digest.update(f"{len(stream)}:{scan['digest']}".encode())
    fingerprint = f"tokens:{split}:{length}:{random}:{separator}:{digest.hexdigest()[:16]}"
    return Windows(
        tuple(streams), length, random, separator=separator, largest=largest, origin=origin, fingerprint=fingerprint
    )
