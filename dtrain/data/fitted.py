"""What reading the examples to train on computes from them, and what a run keeps of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from dtrain.core.types import JsonObject


@dataclass(frozen=True)
class Scaling:
    """The mean and the standard deviation of each value of the examples to train on, float64; empty: not scaled."""

    mean: Sequence[float] = ()
    deviation: Sequence[float] = ()

    @staticmethod
    def of(values: np.ndarray) -> "Scaling":
        """That of the rows of an array (rows, values)."""
        with np.errstate(over="ignore", invalid="ignore"):
            equal = values.min(0) == values.max(0)  # rounding would give these a mean and a deviation of their own
            mean, deviation = np.where(equal, values[0], values.mean(0)), np.where(equal, 0, values.std(0))
        return Scaling(mean.tolist(), deviation.tolist())

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """The scaled rows (rows, values); infinite where a deviation is not finite."""
        if not len(self.mean):
            return values
        mean, deviation = np.array(self.mean), np.array(self.deviation)
        with np.errstate(over="ignore", invalid="ignore"):
            values = (values - mean) / np.where(deviation > 0, deviation, 1)
        return np.where(np.isfinite(deviation), values, np.inf)


@dataclass(frozen=True)
class FittedTable:
    """What the training rows of a table determine."""

    columns: Sequence[str]
    """The columns that the model gets."""
    categories: Mapping[str, Sequence[str]]
    """The texts of each column of texts."""
    medians: Mapping[str, float]
    """Of each column of numbers."""
    gaps: Sequence[str]
    """The columns of numbers of which some are missing."""
    classes: Sequence[str] = ()
    spread: Sequence[float] | None = None
    """Mean and standard deviation of numbers that are predicted."""
    scaling: Scaling = field(default_factory=Scaling)
    decimal: str = ""
    """The decimal sign of its files, if these show that it is a comma: new files with 1.453 alone do not."""

    @property
    def names(self) -> tuple[str, ...]:
        """What the values of a row are: a column of texts has one for each text, a column with gaps one that says
        where."""
        names = []
        for name in self.columns:
            names += [f"{name}={text}" for text in self.categories[name]] if name in self.categories else [name]
            names += [f"{name} is missing"] if name in self.gaps else []
        return tuple(names)

    @property
    def values(self) -> JsonObject:
        """The same as JSON values."""
        return asdict(self)

    @staticmethod
    def from_values(values: JsonObject) -> "FittedTable":
        """From these values."""
        return FittedTable(**{**values, "scaling": Scaling(**values["scaling"])})
