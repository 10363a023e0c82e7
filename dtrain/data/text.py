"""Text files, tokenised once: the tokens are kept in a cache whose name follows from all that made them."""

import hashlib
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from dtrain.batch import Batch, Example
from dtrain.data.codec import Codec, codec
from dtrain.data.files import matching
from dtrain.data.source import Load, Source, Split
from dtrain.data.tokens import held_out, windows
from dtrain.data.windows import row_example
from dtrain.errors import DataError, EnvironmentFault
from dtrain.fields import Fraction, Positive


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
    """Where tokens are kept."""
    load: Load = field(default_factory=Load)

    @property
    def keyed(self) -> bool:
        return False

    def example(self) -> Example:
        return row_example(self.length, self.pack)

    def open(self, split: Split) -> Source:
        made, names = self.codec(), self.test_files if split == "test" and self.test_files else self.files
        files = matching(names, "text")
        separator = made.number(self.end) if self.pack else None
        stream = self._tokenised(files, made, separator)
        if not self.test_files:
            stream = held_out(stream, self.test, split)
        named = str(files[0]) if len(files) == 1 else f"one of {len(files)} files, {files[0]} first"
        return windows([named], [stream], self.length, self.random and split == "train", separator, split)

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        return batch

    def codec(self) -> Codec:
        """How text becomes tokens and back."""
        return codec(self.tokenizer)

    def _tokenised(self, files: list[Path], made: Codec, separator: int | None) -> np.ndarray:
        """The tokens of all files, from the cache where they are in it."""
        try:
            texts = [path.read_bytes() for path in files]
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
        digests = [hashlib.sha256(text).hexdigest() for text in texts]
        name = hashlib.sha256("\n".join([made.key, str(separator), *digests]).encode()).hexdigest()[:24]
        path = Path(self.cache).expanduser() / f"tokens-{name}.npy"
        if not path.exists():
            ending = [] if separator is None else [np.array([separator])]
            parts = [made.encode(text) for text in texts]
            _write(path, np.concatenate([part for p in parts for part in (p, *(e.astype(p.dtype) for e in ending))]))
        return np.load(path, mmap_mode="r", allow_pickle=False)


def _write(path: Path, tokens: np.ndarray) -> None:
    part = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.save(file, tokens, allow_pickle=False)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        hint = "set data.cache to a folder you may write"
        raise EnvironmentFault(f"cannot keep tokens in {path.parent}: {error.strerror}", hint) from error
