"""Examples that are in memory."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dtrain.data.batch import IMAGE, LABEL, Batch, Example, Feature
from dtrain.data.overlap import row_hashes
from dtrain.data.source import SourceDefaults


@dataclass(frozen=True)
class Arrays(SourceDefaults):
    """A source with all examples in memory, one array per feature."""

    features: Mapping[str, np.ndarray]
    example: Example
    fingerprint: str

    @property
    def in_memory(self) -> bool:
        return True

    @property
    def row_labels(self) -> np.ndarray | None:
        return self.features[LABEL] if LABEL in self.example and self.example[LABEL].values else None

    @property
    def content_hashes(self) -> np.ndarray | None:
        return row_hashes(*self.features.values())

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))

    def rows(self, indices: np.ndarray) -> Batch:
        return {name: values[indices] for name, values in self.features.items()}


def image_example(shape: tuple[int, ...], classes: int) -> Example:
    """The features of a classified image: `image` uint8 of that shape, `label` int32 below `classes`."""
    return {IMAGE: Feature(shape, "uint8"), LABEL: Feature((), "int32", classes)}
