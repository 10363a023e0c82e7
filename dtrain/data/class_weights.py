"""The number of examples of each class, and how much each class counts in training."""

from collections.abc import Mapping

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.batch import LABEL
from dtrain.data.source import Source


def class_counts(source: Source) -> dict[str, int]:
    """The number of examples of each class by name; empty if it is not known without reading them."""
    if source.row_labels is None:
        return {}
    counts = np.bincount(source.row_labels, minlength=source.example[LABEL].values or 0).tolist()
    names = source.class_names or tuple(map(str, range(len(counts))))
    return dict(zip(names, counts, strict=True))


def class_weights(setting: str | Mapping[str, float] | None, source: Source) -> np.ndarray | None:
    """How much an example of each class counts, float32 (classes,), by `Recipe.class_weights`; None if all count alike.

    DataError if the classes of the examples are not known, a class has no example, or has no such name.
    """
    if not setting:
        return None
    counts = class_counts(source)
    if not counts:
        message = "class_weights: the classes of the examples are not known before they are read"
        raise DataError(message, "leave it out, or let the loss of a model of your own weigh them")
    if isinstance(setting, str):
        if missing := [name for name, count in counts.items() if not count]:
            raise DataError(f"class_weights: there is no example of {missing[0]} to train on", "give numbers by name")
        return (len(source) / len(counts) / np.array(list(counts.values()))).astype(np.float32)
    if unknown := [name for name in setting if name not in counts]:
        raise DataError(f"class_weights: there is no class {unknown[0]!r}", f"the classes are {', '.join(counts)}")
    return np.array([setting.get(name, 1.0) for name in counts], np.float32)
