"""SentencePiece models, with the tokens that their folders add."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.paths import reason
from dtrain.data.tokenizer_folder import NAMED, Spans, TokenizerFile


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
    def _unprefixed(self) -> Any:
        """The same without the space that the model puts before a text."""
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

        model = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
        model.ParseFromString(self._content)
        model.normalizer_spec.add_dummy_prefix = False
        return SentencePieceProcessor(model_proto=model.SerializeToString())

    @property
    def _prefixes_all(self) -> bool:
        """Whether the text after a special token begins with a space, too, and not only the whole text."""
        return bool(self._about.get("legacy"))

    @property
    def key(self) -> str:
        own = super().key
        about = [sorted(self._added.items())] if self._added else []
        about += ["space before the whole text alone"] if not self._prefixes_all else []
        return hashlib.sha256(f"{own} {' '.join(map(str, about))}".encode()).hexdigest() if about else own

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
                    prefixed = (at == 0 or self._prefixes_all) and part[0] not in SPACES
                    processor = self._processor if prefixed else self._unprefixed
                    pieces = processor.encode(part, return_type="proto").pieces
                    ids += [piece.id for piece in pieces]
                    ranges += [(at + start, at + stop) for start, stop in _characters(part, pieces)]
                at += len(part)
            begin, end = np.array(ranges, np.int64).reshape(-1, 2).T
            inside = np.zeros(len(ids), bool)
            for start, stop in spans:
                inside |= (begin < stop) & (end > start)
            yield np.asarray(ids, np.uint32), inside


SPACES = " \u2581"
"""A space, and how pieces write it."""
ADD_BEGIN = ("LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast")
"""Classes of transformers that put the begin token before a text unless add_bos_token says no."""


def _characters(text: str, pieces: Any) -> Iterator[tuple[int, int]]:
    """(start, stop) of each piece in characters: some versions of the library give them in bytes of UTF-8.

    Of a character that is written as several bytes, the library gives the last one its place, and the others none.
    """
    raw = text.encode()
    in_characters = all(text[piece.begin : piece.end] == piece.surface for piece in pieces)
    for piece in pieces:
        start, stop = piece.begin, piece.end
        if not in_characters:
            start, stop = (len(raw[:place].decode(errors="ignore")) for place in (start, stop))
        yield start, max(stop, start + 1)
