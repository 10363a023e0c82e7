"""The kinds of values that a recipe's fields hold, as types.

Bounds refuse what no run can use: a float32 holds every float, and no loop or array is built of a size
that would use up the machine before the first step.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt


@dataclass(frozen=True)
class Sentence:
    """What a string of a type looks like, for messages."""

    text: str


Positive = Annotated[int, Gt(0), Lt(2**31)]
Natural = Annotated[int, Ge(0), Lt(2**31)]
Depth = Annotated[int, Gt(0), Le(10_000)]
"""Layers or blocks of a model."""
Float = Annotated[float, Ge(-1e30), Le(1e30)]
PositiveFloat = Annotated[float, Ge(1e-30), Le(1e30)]
NonNegative = Annotated[float, Ge(0), Le(1e30)]
Rate = Annotated[float, Ge(1e-30), Le(1e4)]
"""A learning rate."""
Seconds = Annotated[float, Gt(0), Le(1e9)]
"""Also of a timer, which takes no more than some centuries."""
Fraction = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Le(0.9999999)]
"""Below one in float32, too: beyond this it rounds to one."""
Seed = Annotated[int, Ge(0), Lt(2**32)]
DType = Literal["float32", "bfloat16"]
