"""The interface between data and model: named arrays with examples along the first dim."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Preparation(NamedTuple):
    """How pictures become the arrays that a model gets."""

    mean: tuple[float, ...]
    """Subtracted from pixels, scaled to 0..1: one number, or one for each channel."""
    std: tuple[float, ...]
    """What they are then divided by."""
    fit: str = "crop"
    """How a picture of another shape is brought to the model's: crop, pad or stretch."""


Batch = dict[str, Any]
"""Arrays by name, each (examples, ...)."""

IMAGE, LABEL = "image", "label"
"""Pictures (examples, height, width, channels), and the number of each one's class (examples,)."""
FEATURES = "features"
"""The numbers of a row of a table (examples, columns)."""
TOKEN, TARGET = "token", "target"
"""Tokens (examples, length), and the token that follows each; -1 where none is predicted."""
POSITION, DOCUMENT = "position", "document"
"""Where several documents share a row: each token's position in its document, and the document's number."""
SOURCE = "source"
"""1 at the number of each example's source in a mixture, 0 at the others (examples, sources)."""
CALL = "steps_in_call"
"""How many of the batches along the first dim are trained on, where one call runs several steps; a scalar."""
ROW = "row"
"""The number of each row (examples,), for random numbers: counted from the start of the run, and in an evaluation or a
prediction the number of the example in its split."""
STEP = "step_number"
"""The number of updates before this step, the same for each example (examples,)."""
OTHER_IMAGE, OTHER_LABEL = "other_image", "other_label"
"""The image that an image is mixed with, and the number of its class (examples,)."""
SHARE, SMOOTHING = "share", "smoothing"
"""The share of the label against OTHER_LABEL (examples,), and that which is spread over all classes (examples,)."""
WEIGHT = "weight"
"""How much each example counts (examples,): 0 for padding; without this array all count 1."""


@dataclass(frozen=True)
class Feature:
    """One array of an example: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: str
    values: int | None = None
    """For integers, the number of possible values: classes, or tokens of the vocabulary. None if unknown."""
    dims: tuple[str, ...] = ()
    """Names of its dims, if the mesh may shard them: ("length",)."""
    origin: str = ""
    """File that contains the largest value, for messages."""
    spread: tuple[float, float] | None = None
    """Mean and standard deviation over the training examples, of a number that is predicted. None if unknown."""


Example = Mapping[str, Feature]
"""The features of one example, by name."""


def plain_example(example: Example) -> dict[str, object]:
    """Convert an example to values that JSON supports."""
    return {name: asdict(feature) | {"origin": ""} for name, feature in example.items()}


def example_of(plain: Mapping[str, Any]) -> Example:
    """Convert the result of `plain_example` back to an example."""

    def tuples(feature: Mapping[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in feature.items()}

    return {name: Feature(**tuples(feature)) for name, feature in plain.items()}


def tokens_in(example: Example) -> int:
    """Number of tokens of one example; 0 if it has none."""
    return example[TOKEN].shape[0] if TOKEN in example else 0
