"""Rows cut from long streams of tokens.

A row of `length` tokens and the target of each, the token that follows: so a window is one longer
than a row. Where a separator ends each document, no token is asked to tell another document's
first, and a row says to which document each of its tokens belongs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtrain.batch import Batch, Example, Feature

NO_TARGET = -1


@dataclass(frozen=True)
class Windows:
    """Windows of streams of tokens, in order or drawn at random; none crosses from stream to stream."""

    streams: tuple[np.ndarray, ...]
    length: int
    random: bool
    separator: int | None
    largest: int
    origin: str
    """The file in which the largest token stands."""
    fingerprint: str

    @property
    def example(self) -> Example:
        return row_example(self.length, self.separator is not None, self.largest + 1, self.origin)

    @property
    def starts(self) -> int | None:
        return int(self._places[-1]) if self.random else None

    def __len__(self) -> int:
        return int(self._windows[-1])

    @cached_property
    def _windows(self) -> np.ndarray:
        """Windows in the streams before each, and in all."""
        return np.cumsum([0, *((len(stream) - 1) // self.length for stream in self.streams)])

    @cached_property
    def _places(self) -> np.ndarray:
        """Places where a window can start in the streams before each, and in all."""
        return np.cumsum([0, *(max(0, len(stream) - self.length) for stream in self.streams)])

    def rows(self, indices: np.ndarray) -> Batch:
        before, stride = (self._places, 1) if self.random else (self._windows, self.length)
        which = np.searchsorted(before, indices, side="right") - 1
        cut = np.empty((len(indices), self.length + 1), np.int32)
        for row, (stream, index) in enumerate(zip(which, indices, strict=True)):
            start = (index - before[stream]) * stride
            cut[row] = self.streams[stream][start : start + self.length + 1]
        return split(cut, self.separator)


def split(cut: np.ndarray, separator: int | None) -> Batch:
    """Windows (rows, length + 1) as tokens and targets, and where documents are kept apart, those."""
    token, target = cut[:, :-1], cut[:, 1:]
    if separator is None:
        return {"token": token.copy(), "target": target.copy()}
    ends = token == separator
    document = np.cumsum(ends, axis=1, dtype=np.int32) - ends
    at = np.arange(token.shape[1], dtype=np.int32)
    first = np.where(np.diff(document, axis=1, prepend=-1) != 0, at, 0)
    return {
        "token": token.copy(),
        "target": np.where(ends, NO_TARGET, target),
        "document": document.astype(np.int32),
        "position": at - np.maximum.accumulate(first, axis=1),
    }


def row_example(length: int, packed: bool, values: int | None = None, origin: str = "") -> Example:
    """A row of tokens, and its documents where they are kept apart."""
    token = Feature((length,), "int32", values, ("length",), origin)
    plain = Feature((length,), "int32", None, ("length",))
    names = ("target", "document", "position") if packed else ("target",)
    return {"token": token} | dict.fromkeys(names, plain)
