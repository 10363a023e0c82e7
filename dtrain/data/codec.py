"""Text to tokens and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dtrain.errors import DataError

BYTES = "bytes"


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
        import hashlib

        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer

            made = Tokenizer.from_str(self.path.read_text())
            made.no_truncation()  # some files carry the limits of the model they were made for
            made.no_padding()
            return made
        except ModuleNotFoundError:
            raise
        except Exception as error:  # the library raises bare Exception
            reason = str(error).splitlines()[0][:200]
            raise DataError(f"{self.path}: no tokenizer.json: {reason}", 'or set tokenizer to "bytes"') from error

    def encode(self, text: bytes) -> np.ndarray:
        try:
            ids = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError as error:
            raise DataError(
                f"the text is not UTF-8: {error}", 'set tokenizer to "bytes" to read it as it is'
            ) from error
        return np.asarray(ids, np.uint32 if self._tokenizer.get_vocab_size() > 2**16 else np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def number(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise DataError(f"{self.path}: has no token {token!r}", "data.end names the token that ends a document")
        return found


def codec(tokenizer: str | None) -> Codec:
    """The tokenizer of that name; DataError where there is none."""
    if tokenizer is None:
        raise DataError("the recipe names no tokenizer", 'set data.tokenizer to "bytes" or to a tokenizer.json')
    if tokenizer == BYTES:
        return Bytes()
    path = Path(tokenizer).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer", 'set data.tokenizer to "bytes" or to a tokenizer.json')
    return File(path)
