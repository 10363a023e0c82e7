"""Rows of tokens cut from long streams.

A row has `length` tokens, and as target of each token the token that follows it; so a window of the stream has
`length` + 1 tokens. If a separator ends each document, the first token of a document is not a target, and a row has
the document number and the position within the document of each token.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtrain.data.batch import DOCUMENT, POSITION, TARGET, TOKEN, Batch, Example, Feature
from dtrain.data.source import SourceDefaults
from dtrain.data.stream import Stream

NO_TARGET = -1
"""Target of a token without a target: it does not count in the loss."""


@dataclass(frozen=True)
class Windows(SourceDefaults):
    """A source of windows of token streams, consecutive or random; no window crosses from one stream to another."""

    streams: tuple[Stream, ...]
    length: int
    """Tokens per row."""
    random: bool
    """Whether the indices of `rows` are start positions (random sampling) or window numbers."""
    separator: int | None
    largest: int
    """The largest token."""
    origin: str
    """The file that contains the largest token."""
    fingerprint: str
    text_bytes: float = 0.0
    """Bytes of text for each token; 0 if it is not known."""

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes

    @property
    def example(self) -> Example:
        return row_example(self.length, self.separator is not None, self.largest + 1, self.origin)

    @property
    def random_starts(self) -> int | None:
        return int(self._positions[-1]) if self.random else None

    def __len__(self) -> int:
        return int(self._windows[-1])

    @cached_property
    def _windows(self) -> np.ndarray:
        """Cumulative number of windows: before each stream, and in total. Consecutive windows share one token."""
        return np.cumsum([0, *(max(0, len(stream) - 1) // self.length for stream in self.streams)], dtype=np.int64)

    @cached_property
    def _positions(self) -> np.ndarray:
        """Cumulative number of start positions: before each stream, and in total."""
        return np.cumsum([0, *(max(0, len(stream) - self.length) for stream in self.streams)], dtype=np.int64)

    def rows(self, indices: np.ndarray) -> Batch:
        before, stride = (self._positions, 1) if self.random else (self._windows, self.length)
        stream_of = np.searchsorted(before, indices, side="right") - 1
        starts = (indices - before[stream_of]) * stride
        # one array for both: NumPy asks for huge pages for large ones, else page faults take longer than the copies
        token, target = cut = np.empty((2, len(indices), self.length), np.int32)
        present = np.unique(stream_of).tolist()
        for stream in present:
            self.streams[stream].check()
            at = slice(None) if len(present) == 1 else stream_of == stream
            read = _overlapping(self.streams[stream].tokens, self.length + 1)[starts[at]]
            cut[0, at], cut[1, at] = read[:, :-1], read[:, 1:]
        return with_documents(token, target, self.separator)

    def changed(self) -> str:
        """Which file changed after it was opened, and how; empty if none did."""
        return next(filter(None, (stream.changed() for stream in self.streams)), "")


def _overlapping(tokens: np.ndarray, length: int) -> np.ndarray:
    """A view of all windows of the stream: row i has the tokens i to i + `length` - 1."""
    return np.ndarray((len(tokens) - length + 1, length), tokens.dtype, tokens, strides=(tokens.itemsize,) * 2)


def with_documents(token: np.ndarray, target: np.ndarray, separator: int | None) -> Batch:
    """The features of rows of shape (rows, length): `token` and `target`, both int32.

    With a separator also `document`, the number of each token's document within its row, and `position`, its position
    within that document as far as the row contains it; `target` is changed where there is none.
    """
    if separator is None:
        return {TOKEN: token, TARGET: target}
    rows, length = token.shape
    ends = token == separator
    target[ends] = NO_TARGET
    begins = np.empty((rows, length), bool)
    begins[:, 0] = True
    begins[:, 1:] = ends[:, :-1]
    places = np.flatnonzero(begins)  # of the first token of each segment, that is each document's part in a row
    row, first = np.divmod(places, length)
    number = np.arange(len(places)) - np.flatnonzero(first == 0)[row]  # minus the segments of earlier rows
    sizes = np.diff(places, append=rows * length)  # segments are contiguous in the flattened rows
    per_token = np.repeat(np.stack([number, first]).astype(np.int32), sizes, axis=1)
    document, first = per_token.reshape(2, rows, length)
    return {TOKEN: token, TARGET: target, DOCUMENT: document, POSITION: np.arange(length, dtype=np.int32) - first}


def row_example(length: int, packed: bool, values: int | None = None, origin: str = "") -> Example:
    """The features of a row; with `packed`, also `document` and `position`. `values`: size of the vocabulary."""
    token = Feature((length,), "int32", values, ("length",), origin)
    other = Feature((length,), "int32", None, ("length",))
    names = (TARGET, DOCUMENT, POSITION) if packed else (TARGET,)
    return {TOKEN: token} | dict.fromkeys(names, other)
