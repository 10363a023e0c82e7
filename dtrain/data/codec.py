"""Text to tokens and back."""

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
NAMED = 'set data.tokenizer to "bytes", to a tokenizer.json or to a folder that holds one'


class Codec(Protocol):
    """A tokenizer."""

    @property
    def key(self) -> str:
        """Changes whenever the tokens of a text would."""
        ...

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a text in UTF-8."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        ...

    def number(self, token: str) -> int:
        """The number of a token that stands for no text; DataError where there is none of that name."""
        ...


@dataclass(frozen=True)
class Bytes:
    """Every byte a token; 0 ends a document."""

    key: str = BYTES

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")

    def number(self, token: str) -> int:
        return 0


@dataclass(frozen=True)
class File:
    """A tokenizer.json, by the `tokenizers` library."""

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

        with _refusing(f"{self.path}: no tokenizer.json"):
            made = Tokenizer.from_str(self._content.decode())
            made.no_truncation()  # some files carry the limits of the model they were made for
            made.no_padding()
            return made

    @cached_property
    def _dtype(self) -> type[np.unsignedinteger]:
        """By the largest number of a token, which may lie above how many there are."""
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= 2**31:
            raise DataError(f"{self.path}: numbers a token {largest:,}; 2,147,483,647 is the largest that can be used")
        return np.uint32 if largest >= 2**16 else np.uint16

    def encode(self, text: bytes) -> np.ndarray:
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            hint = 'convert it to UTF-8; or set tokenizer to "bytes" to train on its bytes'
            raise DataError(f"the text is not UTF-8: {error}", hint) from error
        with _refusing(f"the tokenizer {self.path} cannot encode the text"):
            return np.asarray(self._tokenizer.encode(decoded, add_special_tokens=False).ids, self._dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def number(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise DataError(f"{self.path}: has no token {token!r}", "data.end names the token that ends a document")
        return found


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """DataError for what the library raises: bare Exception, and PanicException, which is none."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {reason(error)}", "use another tokenizer.json") from error


def codec(tokenizer: str | None) -> Codec:
    """The tokenizer of that name; DataError where there is none."""
    if tokenizer is None:
        raise DataError("the recipe names no tokenizer", NAMED)
    if tokenizer == BYTES:
        return Bytes()
    path = expanded(tokenizer)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            hint = "`tokenizer.save_pretrained(folder)` of the transformers library writes one"
            raise DataError(f"{path.parent}: a folder without a tokenizer.json", hint)
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer", NAMED)
    return File(path)
