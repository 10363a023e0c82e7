"""SentencePiece models (.model), as Llama 2, Mistral and Gemma were published with."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.beside import Beside
from dtrain.data.codec import NAMED, Spans
from dtrain.data.files import reason


class SentencePiece(Beside):
    """A SentencePiece model, read by its library. Special tokens in a text are found before it is split in pieces."""

    @cached_property
    def _processor(self) -> Any:
        from sentencepiece import SentencePieceProcessor

        try:
            return SentencePieceProcessor(model_proto=self._content)
        except (RuntimeError, OSError, ValueError) as error:
            raise DataError(f"{self.path} is not a valid SentencePiece model: {reason(error)}", NAMED) from error

    @property
    def size(self) -> int:
        return self._processor.get_piece_size()

    @property
    def begin(self) -> str:
        return self.special.get("bos_token", "") if self._about.get("add_bos_token") else ""

    @property
    def special(self) -> Mapping[str, str]:
        model, texts = self._processor, dict(super().special)
        for name, number in (("bos_token", model.bos_id()), ("eos_token", model.eos_id())):
            if not texts.get(name) and number >= 0:
                texts[name] = model.id_to_piece(number)
        return texts

    def encode(self, text: bytes) -> np.ndarray:
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"the text is not UTF-8: {error}", "convert it to UTF-8") from error
        return np.asarray(self._processor.encode(decoded), np.uint32 if self.size > 2**16 else np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._processor.decode([int(token) for token in tokens])

    def number(self, token: str) -> int:
        found = self._processor.piece_to_id(token)
        if found == self._processor.unk_id() and self._processor.id_to_piece(found) != token:
            raise DataError(f"{self.path}: has no token {token!r}", "set data.end to the token that ends a document")
        return found

    def marked(self, texts: Sequence[tuple[str, Spans]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        known = sorted(filter(None, set(self.special.values())), key=len, reverse=True)
        split = re.compile(f"({'|'.join(map(re.escape, known))})") if known else None
        for text, spans in texts:
            ids, ranges, at = [], [], 0
            for part in split.split(text) if split else [text]:
                if part in known:
                    ids.append(self.number(part))
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
