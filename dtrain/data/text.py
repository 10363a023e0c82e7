"""Rows from text files. They are tokenised once, into a cache whose name follows from all that made the tokens."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import Fraction, Positive
from dtrain.data.batch import Batch, Example
from dtrain.data.codec import Codec, codec
from dtrain.data.files import matching, refuse_suffix
from dtrain.data.known import file_digest, known
from dtrain.data.source import Load, Source, Split
from dtrain.data.stream import Stream
from dtrain.data.token_cache import cached
from dtrain.data.tokens import held_out, windows
from dtrain.data.windows import row_example

_RECORDS = "its records would train as raw text: write the text that counts to .txt files"
_PACKED = "unpack it first"
_TOKENS = "for tokens, set data.kind to tokens"
FORMATS = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather"), _RECORDS),
    **dict.fromkeys((".tfrecord", ".array_record", ".sqlite"), _RECORDS),
    **dict.fromkeys((".pdf", ".docx", ".epub"), "convert it to .txt first"),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z"), _PACKED),
    **dict.fromkeys((".npy", ".npz", ".bin"), _TOKENS),
}


@dataclass(frozen=True, kw_only=True)
class Text:
    """Rows of tokens from text files."""

    kind: Literal["text"] = "text"
    files: tuple[str, ...]
    """Files or globs; {dtrain} stands for dtrain's own folder."""
    length: Positive
    """Tokens in a row."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a tokenizer.json."""
    test: Fraction = 0.1
    """The part held out at the end of the text."""
    test_files: tuple[str, ...] = ()
    """Files held out, in place of a part of the text."""
    random: bool = True
    """Rows begin anywhere, drawn anew for each; else each has its turn once in an epoch."""
    pack: bool = False
    """Every file is a document, and no token sees another document's."""
    end: str = "<|endoftext|>"
    """The token that ends a document, where they are packed; for bytes it is 0."""
    cache: str = "~/.cache/dtrain"
    """Where tokens are kept, and digests of files."""
    load: Load = field(default_factory=Load)

    @property
    def keyed(self) -> bool:
        return False

    def example(self) -> Example:
        return row_example(self.length, self.pack)

    def open(self, split: Split) -> Source:
        made, names = self.codec(), self.test_files if split == "test" and self.test_files else self.files
        files = matching(names, "text")
        for file in files:
            refuse_suffix(file, "text", FORMATS)
        separator = made.number(self.end) if self.pack else None
        stream = self._tokenised(files, made, separator)
        if not self.test_files:
            stream = held_out(stream, self.test, split)
        named = str(files[0]) if len(files) == 1 else f"one of {len(files)} files, {files[0]} first"
        random = self.random and split == "train"
        return windows([named], [stream], self.length, random, separator, split, self.cache)

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        return batch

    def codec(self) -> Codec:
        """How text becomes tokens and back."""
        return codec(self.tokenizer)

    def _tokenised(self, files: list[Path], made: Codec, separator: int | None) -> Stream:
        """The tokens of all files, from the cache where they are in it."""
        digests = known(self.cache, "text", files, file_digest)
        name = hashlib.sha256("\n".join([made.key, str(separator), *digests]).encode()).hexdigest()[:24]
        return cached(self.cache, name, lambda: _tokens(files, digests, made, separator))


def _tokens(files: Sequence[Path], digests: Sequence[str], made: Codec, separator: int | None) -> Iterator[np.ndarray]:
    """The tokens of one file after the other."""
    made.encode(b"")  # a tokenizer that cannot be read is reported without the name of a text
    for path, digest in zip(files, digests, strict=True):
        try:
            text = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        if hashlib.sha256(text).hexdigest() != digest:
            raise DataError(f"{path}: changed while it was read", "start again when nothing writes to it")
        try:
            tokens = made.encode(text)
        except DataError as error:
            raise DataError(f"{path}: {error.message}", error.hint) from error
        yield tokens
        if separator is not None:
            yield np.array([separator], tokens.dtype)
