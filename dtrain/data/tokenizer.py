"""Tokenizers: text to tokens and back."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject
from dtrain.data.paths import expand_path, reason


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer's file, with tokenizer_config.json and chat_template.jinja in its folder, if they exist."""

    path: Path

    @property
    def key(self) -> str:
        """An id of the tokenizer: a digest of its file."""
        return hashlib.sha256(self._content).hexdigest()

    @property
    def file_bytes(self) -> int:
        return self.path.stat().st_size

    @cached_property
    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _beside(self, name: str) -> JsonObject:
        """A JSON object in a file of that name beside the tokenizer; empty if there is none."""
        path = self.path.with_name(name)
        if not path.is_file():
            return {}
        try:
            about = json.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: cannot be read as JSON: {reason(error)}") from error
        return about if isinstance(about, dict) else {}

    @cached_property
    def _about(self) -> JsonObject:
        return self._beside("tokenizer_config.json")

    @cached_property
    def _templates(self) -> Mapping[str, str]:
        """The chat templates that come with the tokenizer, by name."""
        own = self.path.with_name("chat_template.jinja")
        if own.is_file():
            return {"default": own.read_text()}
        given = self._about.get("chat_template") or self._beside("chat_template.json").get("chat_template")
        if isinstance(given, list):  # several, by name
            pairs = [(one["name"], one["template"]) for one in given if isinstance(one, dict) and "template" in one]
            return {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
        return {"default": given} if isinstance(given, str) else {}

    @property
    def template(self) -> str | None:
        """The chat template that comes with the tokenizer."""
        return self._templates.get("default")

    @property
    def tools_template(self) -> str:
        """The chat template for conversations with tools; empty if it has none of its own."""
        return self._templates.get("tool_use", "")

    @property
    def special(self) -> Mapping[str, Any]:
        return self._special

    @cached_property
    def _special(self) -> Mapping[str, Any]:
        """The special tokens that a chat template may use, by name; those that the tokenizer's files do not state are
        absent. The same as transformers gives to templates, and where it finds none, what config.json states."""
        stated, given = self._beside("special_tokens_map.json"), self._about
        defaults = CLASS_TOKENS.get(str(given.get("tokenizer_class") or "").removesuffix("Fast"), {})
        config = self._beside("config.json")
        if not given.get("tokenizer_class"):
            defaults = MODEL_TOKENS.get(str(config.get("model_type")), {})
        defaults = {name: text for name, text in defaults.items() if self.has(text)}
        texts = {**defaults, **_texts(stated), **_texts(given), **_texts(given.get("extra_special_tokens"))}
        for name in ("bos_token", "eos_token"):
            if name not in texts and name not in given:  # null in tokenizer_config.json: the model has none
                numbers = (about.get(f"{name}_id") for about in (config, self._beside(GENERATION)))
                if text := next(filter(None, map(self._token_text, numbers)), ""):
                    texts[name] = text
        return {name: text for name, text in texts.items() if name not in given or given[name] is not None}

    def _token_text(self, number: Any) -> str:
        """The text of a token by its id, or of the first of several; empty if there is none."""
        number = number[0] if isinstance(number, list) and number else number
        return self.text_of(number) if isinstance(number, int) and not isinstance(number, bool) else ""

    def text_of(self, number: int) -> str:
        """The name of the token with that id; empty if there is none."""
        raise NotImplementedError

    def has(self, token: str) -> bool:
        """Whether the vocabulary has a token of that name."""
        raise NotImplementedError


GENERATION = "generation_config.json"
_ENDOFTEXT: Mapping[str, str] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CLASS_TOKENS: Mapping[str, Mapping[str, str]] = {
    "GPT2Tokenizer": _ENDOFTEXT,
    "CodeGenTokenizer": _ENDOFTEXT,
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "GemmaTokenizer": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "Qwen2Tokenizer": {
        "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"
    },
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}  # fmt: skip
"""The tokens that a class of transformers has where no file names them."""
MODEL_TOKENS = {"gpt2": _ENDOFTEXT}
"""The same for folders without a tokenizer_config.json, by the `model_type` of config.json."""


def _texts(about: Any) -> dict[str, Any]:
    """The special tokens in one of a tokenizer's files, by name, as texts."""
    found: dict[str, Any] = {}
    for name, token in (about if isinstance(about, dict) else {}).items():
        text = token.get("content") if isinstance(token, dict) else token
        if name == "additional_special_tokens" and isinstance(text, list):
            found[name] = [one.get("content") if isinstance(one, dict) else one for one in text]
        elif name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


Spans = Sequence[tuple[int, int]]
"""(start, stop) of parts of a text, in characters."""
BYTES = "bytes"
NAMED = 'set data.tokenizer to "bytes", to a tokenizer.json, a SentencePiece .model, or a folder that contains one'


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
            return tokenizer

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


class SentencePiece(TokenizerFile):
    """A SentencePiece model, read by its library, with the tokens that its folder adds. Special and added tokens in a
    text are found before it is split in pieces."""

    @cached_property
    def _processor(self) -> Any:
        from sentencepiece import SentencePieceProcessor

        try:
            return SentencePieceProcessor(model_proto=self._content)
        except (RuntimeError, OSError, ValueError) as error:
            raise DataError(f"{self.path} is not a valid SentencePiece model: {reason(error)}", NAMED) from error

    @cached_property
    def _added(self) -> Mapping[str, int]:
        """The ids of tokens that tokenizer_config.json and added_tokens.json add to the model, by their text."""
        found = {text: number for text, number in self._beside("added_tokens.json").items() if isinstance(number, int)}
        listed = self._about.get("added_tokens_decoder")
        for number, about in (listed if isinstance(listed, dict) else {}).items():
            if isinstance(about, dict) and isinstance(about.get("content"), str) and number.isdecimal():
                found[about["content"]] = int(number)
        return found

    @property
    def key(self) -> str:
        own = super().key
        if not self._added:
            return own
        return hashlib.sha256(f"{own} {sorted(self._added.items())}".encode()).hexdigest()

    @property
    def size(self) -> int:
        return max(self._processor.get_piece_size(), *(number + 1 for number in self._added.values()), 0)

    @property
    def _dtype(self) -> type[np.unsignedinteger]:
        return np.uint32 if self.size > 2**16 else np.uint16

    @property
    def begin(self) -> str:
        adds = self._about.get("add_bos_token", self._about.get("tokenizer_class") in ADD_BEGIN)
        return self.special.get("bos_token", "") if adds else ""

    @cached_property
    def _special(self) -> Mapping[str, Any]:
        model, texts = self._processor, dict(super()._special)
        for name, number in (("bos_token", model.bos_id()), ("eos_token", model.eos_id())):
            if not texts.get(name) and number >= 0:
                texts[name] = model.id_to_piece(number)
        return texts

    def encode(self, text: bytes) -> np.ndarray:
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"the text is not UTF-8: {error}", "convert it to UTF-8") from error
        return np.asarray(self._processor.encode(decoded), self._dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        added = {number: text for text, number in self._added.items()}
        parts = []
        for known, group in groupby(map(int, tokens), lambda token: token in added):
            own = list(group)
            parts.append("".join(added[one] for one in own) if known else self._processor.decode(own))
        return "".join(parts)

    def text_of(self, number: int) -> str:
        added = {own: text for text, own in self._added.items()}
        return added.get(number) or (self._processor.id_to_piece(number) if 0 <= number < self.size else "")

    def has(self, token: str) -> bool:
        number = self._processor.piece_to_id(token)
        return token in self._added or self._processor.id_to_piece(number) == token

    def token_id(self, token: str) -> int:
        if token in self._added:
            return self._added[token]
        number = self._processor.piece_to_id(token)
        if not self.has(token):
            raise DataError(f"{self.path}: has no token {token!r}", "name a token of its vocabulary")
        return number

    def encode_with_spans(self, texts: Sequence[tuple[str, Spans]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        texts_of = [text for text in self.special.values() if isinstance(text, str) and text]
        known = sorted({*texts_of, *self._added}, key=len, reverse=True)
        split = re.compile(f"({'|'.join(map(re.escape, known))})") if known else None
        for text, spans in texts:
            ids, ranges, at = [], [], 0
            for part in split.split(text) if split else [text]:
                if part in known:
                    ids.append(self.token_id(part))
                    ranges.append((at, at + len(part)))
                elif part:
                    for piece in self._processor.encode(part, return_type="proto").pieces:
                        ids.append(piece.id)
                        ranges.append((at + piece.begin, at + piece.end))
                at += len(part)
            begin, end = np.array(ranges, np.int64).reshape(-1, 2).T
            inside = np.zeros(len(ids), bool)
            for start, stop in spans:
                inside |= (begin < stop) & (end > start)
            yield np.asarray(ids, np.uint32), inside


ADD_BEGIN = ("LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast")
"""Classes of transformers that put the begin token before a text unless add_bos_token says no."""


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
