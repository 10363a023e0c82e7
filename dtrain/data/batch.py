"""What data promises and a model takes: named arrays, examples along the first dim."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Batch = dict[str, Any]
"""Arrays by name, each (examples, ...). `weight` (examples,) is 0 for padding; absent, all count."""


@dataclass(frozen=True)
class Feature:
    """One array of an example: its shape, its dtype, and for whole numbers the number of values."""

    shape: tuple[int, ...]
    dtype: str
    values: int | None = None
    dims: tuple[str, ...] = ()
    """The names of its dims, where the mesh may split them: ("length",)."""
    origin: str = ""
    """Where the largest value stands, for messages."""


Example = Mapping[str, Feature]
"""The features of one example, by name."""


def plain_example(example: Example) -> dict[str, Any]:
    """The example as JSON can hold it."""
    return {name: asdict(feature) | {"origin": ""} for name, feature in example.items()}


def example_of(plain: Mapping[str, Any]) -> Example:
    """The other way."""
    return {
        name: Feature(**feature | {"shape": tuple(feature["shape"]), "dims": tuple(feature["dims"])})
        for name, feature in plain.items()
    }


def tokens_in(example: Example) -> int:
    """Tokens of one example; 0 where it has none."""
    return example["token"].shape[0] if "token" in example else 0
