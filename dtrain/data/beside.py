"""What stands beside the file of a tokenizer: its chat template and its special tokens."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject
from dtrain.data.files import reason


@dataclass(frozen=True)
class Beside:
    """A tokenizer's file, with tokenizer_config.json and chat_template.jinja in its folder, if they exist."""

    path: Path

    @property
    def key(self) -> str:
        """An id of the tokenizer: a digest of its file."""
        return hashlib.sha256(self._content).hexdigest()

    @cached_property
    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error

    @cached_property
    def _about(self) -> JsonObject:
        """tokenizer_config.json beside the tokenizer; empty if there is none."""
        path = self.path.with_name("tokenizer_config.json")
        if not path.is_file():
            return {}
        try:
            about = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as JSON: {reason(error)}") from error
        return about if isinstance(about, dict) else {}

    @property
    def template(self) -> str | None:
        """The chat template that comes with the tokenizer."""
        own = self.path.with_name("chat_template.jinja")
        if own.is_file():
            return own.read_text()
        found = self._about.get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {one["name"]: one["template"] for one in found if isinstance(one, dict) and "template" in one}
            found = named.get("default")
        return found if isinstance(found, str) else None

    @property
    def special(self) -> Mapping[str, str]:
        """The text of special tokens that a chat template may use: bos_token, eos_token; empty if there is none."""
        texts = {}
        for name in ("bos_token", "eos_token"):
            token = self._about.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            texts[name] = text if isinstance(text, str) else ""
        return texts
