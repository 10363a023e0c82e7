"""What a source of examples is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import jax
import numpy as np
from annotated_types import Ge, Le

from dtrain.core.errors import DataError
from dtrain.data.batch import Batch, Example, Feature

Split = Literal["train", "test"]
Readers = Annotated[int, Ge(0), Le(1024)]
CHANGED = "put the same file back and start again to resume; other data need another name: name=..."


@dataclass(frozen=True, kw_only=True)
class Load:
    """How examples are read ahead. Neither number changes which examples a batch holds."""

    prefetch: Readers | None = None
    """Batches read ahead by a thread; where not said, 2, or none where the examples lie in memory."""
    workers: Readers = 0
    """Processes that read; they pay where a batch takes more than about a millisecond to make. None starts where the
    examples lie in memory."""


class Source(Protocol):
    """Examples that can be had by number."""

    @property
    def example(self) -> Example:
        """Shape and dtype of each feature."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever the examples do."""
        ...

    @property
    def starts(self) -> int | None:
        """Where rows are drawn at random, from how many places; None where each example has its turn."""
        ...

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> Batch:
        """Many examples at once, as host arrays. Pure: the same numbers give the same rows.

        DataError where a file that they are read from changed since it was opened.
        """
        ...

    def changed(self) -> str:
        """Which file differs from what was opened; empty where none does, or none is read any more."""
        ...


class Data(Protocol):
    """A frozen dataclass: the recipe's `data` section itself."""

    @property
    def load(self) -> Load: ...

    @property
    def keyed(self) -> bool:
        """Whether `prepare` draws at random, for which a batch carries its global row numbers."""
        ...

    def example(self) -> Example | None:
        """Shape and dtype of each feature, where they are known without reading the examples."""
        ...

    def open(self, split: Split) -> Source:
        """The examples of a split; DataError where there are none."""
        ...

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        """What is done to examples on the device: numbers scaled, and augmented when training."""
        ...


UNKNOWN = "not known before the first run"
"""The fingerprint of data that has not been read: the first run accepts what it finds and records it."""


@dataclass(frozen=True)
class Arrays:
    """Examples held in memory, a feature an array."""

    features: Mapping[str, np.ndarray]
    example: Example
    fingerprint: str
    starts: None = None

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))

    def rows(self, indices: np.ndarray) -> Batch:
        return {name: values[indices] for name, values in self.features.items()}

    def changed(self) -> str:
        return ""


def refuse_changed(*sources: Source) -> None:
    """DataError where a file that examples come from is no longer what it was when it was opened."""
    for changed in filter(None, (source.changed() for source in sources)):
        raise DataError(changed, CHANGED)


def image_example(shape: tuple[int, ...], classes: int) -> Example:
    """An image of bytes and its class."""
    return {"image": Feature(shape, "uint8"), "label": Feature((), "int32", classes)}
