"""The contract of a model."""

from typing import NamedTuple, Protocol

import jax

from dtrain.data.batch import Batch, Example
from dtrain.models.nn.context import Context
from dtrain.models.nn.param import Tree


class Loss(NamedTuple):
    """Sums over examples: a mean is taken once, after every reduction, as `sum / weight`."""

    sum: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]


class Metric(NamedTuple):
    """A metric that a model returns, declared in its `metrics`, so that a best value can be named and kept."""

    name: str
    higher_is_better: bool


class Flops(NamedTuple):
    """Floating-point operations of one training step, and the convention they are counted by."""

    step: float
    convention: str


class Model(Protocol):
    """A frozen dataclass: the recipe's `model` section itself."""

    def params(self) -> Tree:
        """The declared parameters: a nested dict of `Param`."""
        ...

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        """The loss of a batch, as sums. Metrics share the loss's weight."""
        ...

    def flops(self, example: Example, examples: int) -> Flops:
        """The cost of one step on that many such examples."""
        ...

    def mismatch(self, example: Example) -> str:
        """Why the model cannot take such examples, both numbers shown; empty where it can."""
        ...
