"""Types of recipe fields, with bounds, and types without a class of their own.

The bounds reject values that no run can use: every float fits into a float32, and no size exhausts the machine before
the first step.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

JsonObject = dict[str, Any]
"""What JSON can hold, by name: a file such as run.json, a line of metrics, a recipe without its classes."""

Device = Any
"""A device of JAX; type checkers do not accept jax.Device, for which JAX has no type stub."""


@dataclass(frozen=True)
class Sentence:
    """Describes the valid strings of a type, for messages."""

    text: str


Positive = Annotated[int, Gt(0), Lt(2**31)]
Natural = Annotated[int, Ge(0), Lt(2**31)]
Depth = Annotated[int, Gt(0), Le(10_000)]
"""Number of layers or blocks of a model."""
Float = Annotated[float, Ge(-1e30), Le(1e30)]
PositiveFloat = Annotated[float, Ge(1e-30), Le(1e30)]
NonNegative = Annotated[float, Ge(0), Le(1e30)]
Rate = Annotated[float, Ge(1e-30), Le(1e4)]
"""A learning rate."""
Seconds = Annotated[float, Gt(0), Le(1e9)]
"""A duration; the bound keeps it valid as a timeout of Python's timers."""
Fraction = Annotated[float, Ge(0), Le(1)]
Share = Annotated[float, Ge(0), Lt(1)]
"""A part of a whole, but not all of it."""
Decay = Annotated[float, Ge(0), Le(0.9999999)]
"""A decay factor below 1; a larger value would round to 1 in float32."""
Seed = Annotated[int, Ge(0), Lt(2**32)]
DType = Literal["float32", "bfloat16"]
Answers = Literal["", "pairs", "judged"]
"""What a row of data has to compare: two answers to one prompt, the preferred one first; or an answer that is good or
bad, beside one to another prompt."""
