"""What the adapters of other libraries' modules share: the inputs of a module, its loss, and its statistics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import ACCURACY, Metric
from dtrain.data.batch import IMAGE, TOKEN, WEIGHT, Batch
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import classify
from dtrain.models.nn.model import Loss
from dtrain.models.nn.param import Tree, paths

LossOf = Callable[[Any, Batch, Context], Loss]
"""(outputs of the module for the examples, batch, context) → sums over the examples."""

EXAMPLES = "examples"
"""The name of the vmapped axis of examples, for collectives inside a module."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How dtrain calls a module that another library defines."""

    loss_of: LossOf = classify
    """The loss of the module's outputs: `layers.classify`, `layers.next_token` or a function of your own."""
    inputs: tuple[str, ...] | None = None
    """The arrays of the batch that the module is called with; default: the image, or the tokens."""
    metrics: tuple[Metric, ...] = (ACCURACY,)
    """The metrics that `loss_of` returns."""

    def arrays(self, batch: Batch) -> list[jax.Array]:
        """The arrays that the module is called with, each (examples, ...)."""
        names = self.inputs or tuple(name for name in (IMAGE, TOKEN) if name in batch)[:1]
        missing = [name for name in names if name not in batch]
        if missing or not names:
            found = f"the batch has {', '.join(sorted(batch))}"
            what = f"no array {missing[0]!r}" if missing else "neither an image nor tokens"
            raise RecipeError(f"{what} for the module: {found}", "inputs=('name', ...) names the module's arguments")
        return [batch[name] for name in names]


def weighted_sums(statistics: Tree, batch: Batch, prefix: str = "") -> dict[str, jax.Array]:
    """`Loss.statistics` from the next values that each example gives (examples, ...): their weighted sums, by path."""

    def summed(value: jax.Array) -> jax.Array:
        weight = batch.get(WEIGHT, jnp.ones(len(value), jnp.float32))
        return jnp.tensordot(weight, value.astype(jnp.float32), 1, precision="highest")

    names = [prefix + name for name in jax.tree.leaves(paths(statistics))]
    return dict(zip(names, map(summed, jax.tree.leaves(statistics)), strict=True))
