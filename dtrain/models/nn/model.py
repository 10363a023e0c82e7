"""The contract that every model implements."""

from typing import NamedTuple, Protocol

import jax

from dtrain.data.batch import Batch, Example
from dtrain.models.nn.context import Context
from dtrain.models.nn.param import Tree


class Loss(NamedTuple):
    """Sums over examples; the mean is computed once, after all reductions, as `sum / weight`."""

    sum: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]


class Metric(NamedTuple):
    """A metric that a model returns, declared in its `metrics`: a checkpoint policy can then keep the best value."""

    name: str
    higher_is_better: bool


class Flops(NamedTuple):
    """Floating-point operations of one training step, and the convention by which they are counted."""

    step: float
    convention: str


class Model(Protocol):
    """A frozen dataclass: the recipe's `model` section itself."""

    def params(self) -> Tree:
        """The declared parameters: a nested dict of `Param`."""
        ...

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        """The loss of a batch, as sums. Metrics are divided by the same weight as the loss."""
        ...

    def flops(self, example: Example, examples: int) -> Flops:
        """The cost of one training step on `examples` such examples."""
        ...

    def mismatch(self, example: Example) -> str:
        """Why the model cannot take such examples, with the model's and the data's numbers; empty if it can."""
        ...
