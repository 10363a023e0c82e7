"""Tokenizers: text to tokens and back."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.paths import expand_path, reason
from dtrain.data.sentence_piece import SentencePiece
from dtrain.data.tokenizer_folder import NAMED, Spans, TokenizerFile

BYTES = "bytes"


class Tokenizer(Protocol):
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

    def token_id(self, token: str) -> int:
        """The id of a token by its name, such as <|endoftext|>; DataError if there is no such token."""
        ...

    def encode_with_spans(self, texts: Sequence[tuple[str, Spans]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The tokens of each text (tokens,), and which of them have a character in one of its spans; the text of a
        special token is that token.
        """
        ...

    @property
    def size(self) -> int:
        """One more than the largest token."""
        ...

    @property
    def begin(self) -> str:
        """The text of the special tokens that the tokenizer puts before a text, such as <s>; often empty."""
        ...

    @property
    def path(self) -> Path | None:
        """Its file, which may have others in its folder; None if it has none."""
        ...

    @property
    def file_bytes(self) -> int:
        """The size of its file; 0 if it has none."""
        ...

    @property
    def template(self) -> str | None:
        """The chat template that comes with the tokenizer."""
        ...

    @property
    def tools_template(self) -> str:
        """The chat template for conversations with tools; empty if it has none of its own."""
        ...

    @property
    def special(self) -> Mapping[str, Any]:
        """The special tokens that a chat template may use: bos_token, eos_token and others, where it has them."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Byte-level tokenizer: every byte is a token; 0 ends a document."""

    key: str = BYTES
    template: str | None = None
    tools_template: str = ""
    size: int = 256
    begin: str = ""
    path: Path | None = None
    file_bytes: int = 0

    @property
    def special(self) -> Mapping[str, Any]:
        return {"bos_token": "", "eos_token": "\0"}

    def encode_with_spans(self, texts: Sequence[tuple[str, Spans]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for text, spans in texts:
            tokens = self.encode(text.encode())
            inside = np.zeros(len(tokens), bool)
            for start, stop in spans:
                first = len(text[:start].encode())
                inside[first : first + len(text[start:stop].encode())] = True
            yield tokens, inside

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")

    def token_id(self, token: str) -> int:
        return 0


@dataclass(frozen=True)
class TokenizerJson(TokenizerFile):
    """A tokenizer.json file, read by the `tokenizers` library."""

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        with _library_errors(f"{self.path} is not a valid tokenizer.json"):
            tokenizer = Tokenizer.from_str(self._content.decode())
            tokenizer.no_truncation()  # some files set the length limits of the model they belong to
            tokenizer.no_padding()
        for number, text in self._absent:
            self._add(tokenizer, text, number)
        return tokenizer

    def _add(self, tokenizer: Any, text: str, number: int) -> None:
        """Add a token that stands in tokenizer_config.json, or in added_tokens.json, alone."""
        from tokenizers import AddedToken

        listed = self._about.get("added_tokens_decoder")
        about = (listed.get(str(number)) if isinstance(listed, dict) else None) or {}
        how = {name: bool(about[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in about}
        tokenizer.add_special_tokens([AddedToken(text, special=True, **{"normalized": False, **how})])
        if tokenizer.token_to_id(text) != number:
            message = f"{self.path}: has no token {text!r}, to which the files beside it give the id {number:,}"
            raise DataError(message, "its ids end elsewhere: use the tokenizer.json that belongs to them")

    @property
    def key(self) -> str:
        own, absent = super().key, self._absent
        return hashlib.sha256(f"{own} {absent}".encode()).hexdigest() if absent else own

    @cached_property
    def _absent(self) -> list[tuple[int, str]]:
        """The tokens that stand as added in the files beside it alone, by their ids."""
        if not self._added:
            return []
        with _library_errors(f"{self.path} is not a valid tokenizer.json"):
            known = json.loads(self._content).get("added_tokens") or []
        written = {one.get("content") for one in known}
        return sorted((number, text) for text, number in self._added.items() if text not in written)

    @property
    def size(self) -> int:
        """One more than the largest token id, which may be above the number of tokens."""
        return self._size

    @cached_property
    def _size(self) -> int:
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= 2**31:
            raise DataError(f"{self.path}: has the token id {largest:,}; the maximum is 2,147,483,647")
        return largest + 1

    @property
    def _dtype(self) -> type[np.unsignedinteger]:
        """Smallest dtype for all tokens."""
        return np.uint32 if self.size > 2**16 else np.uint16

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

    def text_of(self, number: int) -> str:
        return self._tokenizer.id_to_token(number) or ""

    def has(self, token: str) -> bool:
        return self._tokenizer.token_to_id(token) is not None

    @property
    def begin(self) -> str:
        with _library_errors(f"the tokenizer {self.path} cannot encode a text"):
            whole, alone = (self._tokenizer.encode("a", add_special_tokens=add) for add in (True, False))
        count = whole.tokens.index(alone.tokens[0]) if alone.tokens and alone.tokens[0] in whole.tokens else 0
        return "".join(whole.tokens[:count])

    def encode_with_spans(self, texts: Sequence[tuple[str, Spans]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with _library_errors(f"the tokenizer {self.path} cannot encode the text"):
            encodings = self._tokenizer.encode_batch([text for text, _ in texts], add_special_tokens=False)
        for (text, spans), encoding in zip(texts, encodings, strict=True):
            inside = np.zeros(len(encoding.ids), bool)
            for start, stop in spans:
                inside[slice(*_tokens_in(encoding, start, min(stop, len(text))))] = True
            yield np.asarray(encoding.ids, self._dtype), inside

    def token_id(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            hint = "set data.end to the token that ends a document"
            raise DataError(f"{self.path}: has no token {token!r}", hint)
        return token_id


def _tokens_in(encoding: Any, start: int, stop: int) -> tuple[int, int]:
    """The first token with one of the characters `start` to `stop` - 1, and the one after the last such token."""
    within = range(start, stop)
    first = next((token for at in within if (token := encoding.char_to_token(at)) is not None), None)
    if first is None:
        return 0, 0
    last = next(token for at in reversed(within) if (token := encoding.char_to_token(at)) is not None)
    count = len(encoding.ids)
    while last + 1 < count and (chars := encoding.token_to_chars(last + 1)) and chars[0] < stop:
        last += 1  # a character of several tokens
    return first, last + 1


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


def packages_of(tokenizer: str | None) -> tuple[str, ...]:
    """The package that reads the tokenizer."""
    if tokenizer is None or tokenizer == BYTES:
        return ()
    path = expand_path(tokenizer)
    pieces = path.suffix == ".model" or (
        (path / "tokenizer.model").is_file() and not (path / "tokenizer.json").is_file()
    )
    return ("sentencepiece" if pieces else "tokenizers",)


def open_tokenizer(tokenizer: str | None) -> Tokenizer:
    """The tokenizer for a value of `data.tokenizer`; DataError if it is None or no such file exists."""
    if tokenizer is None:
        raise DataError("the recipe has no data.tokenizer", NAMED)
    if tokenizer == BYTES:
        return ByteTokenizer()
    path = expand_path(tokenizer)
    if path.is_dir():
        found = next((path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()), None)
        if found is None:
            hint = "`tokenizer.save_pretrained(folder)` of the transformers library writes one"
            raise DataError(f"{path}: this folder has no tokenizer.json and no tokenizer.model", hint)
        path = found
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer file", NAMED)
    if path.suffix == ".model":
        return SentencePiece(path)
    return TokenizerJson(path)
