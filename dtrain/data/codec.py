"""Tokenizers: text to tokens and back."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.files import expanded, reason

BYTES = "bytes"
NAMED = 'set data.tokenizer to "bytes", to a tokenizer.json or to a folder that contains one'


class Codec(Protocol):
    """A tokenizer."""

    @property
    def key(self) -> str:
        """An id of the tokenizer, which changes whenever the tokens of a text would change."""
        ...

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a UTF-8 text, of shape (tokens,); DataError if it cannot be encoded."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens."""
        ...

    def number(self, token: str) -> int:
        """The id of a token by its name, such as <|endoftext|>; DataError if there is no such token."""
        ...


@dataclass(frozen=True)
class Bytes:
    """Byte-level tokenizer: every byte is a token; 0 ends a document."""

    key: str = BYTES

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")

    def number(self, token: str) -> int:
        return 0


@dataclass(frozen=True)
class File:
    """A tokenizer.json file, read by the `tokenizers` library."""

    path: Path

    @property
    def key(self) -> str:
        return hashlib.sha256(self._content).hexdigest()

    @cached_property
    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}", NAMED) from error

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        with _library_errors(f"{self.path} is not a valid tokenizer.json"):
            tokenizer = Tokenizer.from_str(self._content.decode())
            tokenizer.no_truncation()  # some files set the length limits of the model they belong to
            tokenizer.no_padding()
            return tokenizer

    @cached_property
    def _dtype(self) -> type[np.unsignedinteger]:
        """Smallest dtype for the largest token id, which may be above the number of tokens."""
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= 2**31:
            raise DataError(f"{self.path}: has the token id {largest:,}; the maximum is 2,147,483,647")
        return np.uint32 if largest >= 2**16 else np.uint16

    def encode(self, text: bytes) -> np.ndarray:
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            hint = 'convert it to UTF-8, or set data.tokenizer to "bytes" to train on its bytes'
            raise DataError(f"the text is not UTF-8: {error}", hint) from error
        with _library_errors(f"the tokenizer {self.path} cannot encode the text"):
            return np.asarray(self._tokenizer.encode(decoded, add_special_tokens=False).ids, self._dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def number(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            hint = "set data.end to the token that ends a document"
            raise DataError(f"{self.path}: has no token {token!r}", hint)
        return token_id


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Convert errors of `tokenizers` to DataError: plain Exception, and PanicException, which is not an Exception."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {reason(error)}", "use another tokenizer.json in data.tokenizer") from error


def codec(tokenizer: str | None) -> Codec:
    """The tokenizer for a value of `data.tokenizer`; DataError if it is None or no such file exists."""
    if tokenizer is None:
        raise DataError("the recipe has no data.tokenizer", NAMED)
    if tokenizer == BYTES:
        return Bytes()
    path = expanded(tokenizer)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            hint = "`tokenizer.save_pretrained(folder)` of the transformers library writes one"
            raise DataError(f"{path.parent}: this folder has no tokenizer.json", hint)
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer file", NAMED)
    return File(path)
