"""A tokenizer's file and what stands beside it: templates and the names of its special tokens."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError
from dtrain.core.files import read_object, refuse_pointer
from dtrain.core.types import JsonObject
from dtrain.data.paths import reason

Spans = Sequence[tuple[int, int]]
"""(start, stop) of parts of a text, in characters."""
NAMED = 'set data.tokenizer to "bytes", to a tokenizer.json, a SentencePiece .model, or a folder that contains one'


@dataclass(frozen=True)
class TokenizerFile(ABC):
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
        refuse_pointer(self.path)
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _beside(self, name: str) -> JsonObject:
        """A JSON object in a file of that name beside the tokenizer; empty if there is none."""
        path = self.path.with_name(name)
        if not path.is_file():
            return {}
        return read_object(path)

    @cached_property
    def _about(self) -> JsonObject:
        return self._beside("tokenizer_config.json")

    @cached_property
    def _added(self) -> Mapping[str, int]:
        """The ids of tokens that tokenizer_config.json and added_tokens.json add, by their text."""
        found = {text: number for text, number in self._beside("added_tokens.json").items() if isinstance(number, int)}
        listed = self._about.get("added_tokens_decoder")
        for number, about in (listed if isinstance(listed, dict) else {}).items():
            if isinstance(about, dict) and isinstance(about.get("content"), str) and number.isdecimal():
                found[about["content"]] = int(number)
        return found

    @cached_property
    def _templates(self) -> Mapping[str, str]:
        """The chat templates that come with the tokenizer, by name."""
        own = self.path.with_name("chat_template.jinja")
        if own.is_file():
            try:
                return {"default": own.read_text(encoding="utf-8-sig")}
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{own}: the chat template cannot be read: {reason(error)}") from error
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

    @abstractmethod
    def text_of(self, number: int) -> str:
        """The name of the token with that id; empty if there is none."""

    @abstractmethod
    def has(self, token: str) -> bool:
        """Whether the vocabulary has a token of that name."""


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
