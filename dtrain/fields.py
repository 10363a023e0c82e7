"""The kinds of values that a recipe's fields hold, said once as types."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

Positive = Annotated[int, Gt(0), Lt(2**31)]
Natural = Annotated[int, Ge(0), Lt(2**31)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
DType = Literal["float32", "bfloat16"]
