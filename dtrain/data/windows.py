"""Rows cut from long streams of tokens.

A row of `length` tokens and the target of each, the token that follows: so a window is one longer
than a row. Where a separator ends each document, the first token of a document is no target,
and a row holds to which document each of its tokens belongs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtrain.data.batch import Batch, Example, Feature
from dtrain.data.stream import Stream

NO_TARGET = -1


@dataclass(frozen=True)
class Windows:
    """Windows of streams of tokens, in order or drawn at random; none crosses from stream to stream."""

    streams: tuple[Stream, ...]
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
        return np.cumsum([0, *(max(0, len(stream) - 1) // self.length for stream in self.streams)], dtype=np.int64)

    @cached_property
    def _places(self) -> np.ndarray:
        """Places where a window can start in the streams before each, and in all."""
        return np.cumsum([0, *(max(0, len(stream) - self.length) for stream in self.streams)], dtype=np.int64)

    def rows(self, indices: np.ndarray) -> Batch:
        before, stride = (self._places, 1) if self.random else (self._windows, self.length)
        which = np.searchsorted(before, indices, side="right") - 1
        starts = (indices - before[which]) * stride
        for stream in np.unique(which).tolist():
            self.streams[stream].check()
        cut = np.empty((len(indices), self.length + 1), np.int32)
        for row, (stream, start) in enumerate(zip(which.tolist(), starts.tolist(), strict=True)):
            cut[row] = self.streams[stream].tokens[start : start + self.length + 1]
        return split(cut, self.separator)

    def changed(self) -> str:
        """Which file differs from what was opened; empty where none does."""
        return next(filter(None, (stream.changed() for stream in self.streams)), "")


def split(cut: np.ndarray, separator: int | None) -> Batch:
    """Windows (rows, length + 1) as tokens and targets, and where documents are kept apart, those."""
    token, target = cut[:, :-1].copy(), cut[:, 1:].copy()
    if separator is None:
        return {"token": token, "target": target}
    rows, length = token.shape
    ends = token == separator
    target[ends] = NO_TARGET
    begins = np.zeros((rows, length), bool)
    begins[:, 0] = True
    begins[:, 1:] = ends[:, :-1]
    row, first = np.nonzero(begins)  # of each part of a document
    number = np.arange(len(row)) - np.searchsorted(row, row)  # of the part in its row
    sizes = np.diff(row * length + first, append=rows * length)
    spread = lambda values: np.repeat(values.astype(np.int32), sizes).reshape(rows, length)  # noqa: E731
    position = np.arange(length, dtype=np.int32) - spread(first)
    return {"token": token, "target": target, "document": spread(number), "position": position}


def row_example(length: int, packed: bool, values: int | None = None, origin: str = "") -> Example:
    """A row of tokens, and its documents where they are kept apart."""
    token = Feature((length,), "int32", values, ("length",), origin)
    plain = Feature((length,), "int32", None, ("length",))
    names = ("target", "document", "position") if packed else ("target",)
    return {"token": token} | dict.fromkeys(names, plain)
