"""Models given by what they output: inputs of a module, loss and predictions from its outputs, statistics."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import ACCURACY, MAE, Metric
from dtrain.data.batch import FEATURES, IMAGE, LABEL, TOKEN, WEIGHT, Batch
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import classify, next_token, probabilities, regress, row_losses
from dtrain.models.nn.model import VALUE, Loss
from dtrain.models.nn.param import Tree, paths

LossOf = Callable[[Any, Batch, Context], Loss]
"""(outputs of the module for the examples, batch, context) → sums over the examples."""

EXAMPLES = "examples"
"""The name of the vmapped axis of examples, for collectives inside a module."""


@dataclass(frozen=True, kw_only=True)
class Adapter(ABC):
    """How dtrain calls a module that another library defines."""

    loss_of: LossOf = classify
    """The loss of the module's outputs: `layers.classify`, `layers.next_token` or a function of your own."""
    inputs: tuple[str, ...] | None = None
    """The arrays of the batch that the module is called with; default: the image, the tokens, or the features."""
    metrics: tuple[Metric, ...] = (ACCURACY,)
    """The metrics that `loss_of` returns."""

    @abstractmethod
    def outputs(self, params: Tree, batch: Batch, ctx: Context) -> Any:
        """What the module returns for the examples of a batch; in inference mode if `ctx.train` is false."""

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        """The loss of the outputs, as sums over the examples."""
        return self.loss_of(self.outputs(params, batch, ctx), batch, ctx)

    def predict(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        """Probabilities for a classifier, losses of rows for next tokens, numbers in the shape of the labels for
        `layers.regress`; else what the module returns, by path."""
        outputs = self.outputs(params, batch, ctx)
        if self.loss_of is classify:
            return probabilities(outputs)
        if self.loss_of is next_token:
            return row_losses(outputs, batch, ctx)
        if self.loss_of is regress:
            one_each = outputs.ndim == 2 and outputs.shape[1] == 1  # (examples, 1); new examples may have no label
            shape = batch[LABEL].shape if LABEL in batch else outputs.shape[:1] if one_each else outputs.shape
            return {VALUE: outputs.astype(jnp.float32).reshape(shape)}
        leaves = jax.tree.leaves(outputs)
        names = [name or "output" for name in jax.tree.leaves(paths(outputs))]
        return dict(zip(names, leaves, strict=True))

    def arrays(self, batch: Batch) -> list[jax.Array]:
        """The arrays that the module is called with, each (examples, ...)."""
        names = self.inputs or tuple(name for name in (IMAGE, TOKEN, FEATURES) if name in batch)[:1]
        missing = [name for name in names if name not in batch]
        if missing or not names:
            found = f"the batch has {', '.join(sorted(batch))}"
            what = f"no array {missing[0]!r}" if missing else "no image, tokens or features"
            raise RecipeError(f"{what} for the module: {found}", "inputs=('name', ...) names the module's arguments")
        return [batch[name] for name in names]


@dataclass(frozen=True)
class FromOutputs(Adapter):
    """A user's model without a loss of its own: `outputs(params, batch, ctx)`, and the loss in its `loss_of`."""

    model: Any

    def outputs(self, params: Tree, batch: Batch, ctx: Context) -> Any:
        return self.model.outputs(params, batch, ctx)

    def predict(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        """What the model's own `predict` returns, if it has one."""
        own = getattr(self.model, "predict", super().predict)
        return own(params, batch, ctx)

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not set yet: the object is being copied
            raise AttributeError(name)
        return getattr(self.model, name)


METRICS = {classify: (ACCURACY,), regress: (MAE,)}
"""What the losses of dtrain return beside the loss."""


def from_outputs(model: Any) -> FromOutputs:
    """The model with a loss and predictions from its outputs; by default those of a classifier."""
    loss_of = vars(model).get("loss_of", getattr(type(model), "loss_of", classify))
    metrics = getattr(model, "metrics", METRICS.get(loss_of, ()))
    if isinstance(loss_of, FunctionType) and next(iter(inspect.signature(loss_of).parameters), "") == "self":
        loss_of = partial(loss_of, model)  # a method
    return FromOutputs(model, loss_of=loss_of, metrics=metrics)


def weighted_sums(statistics: Tree, batch: Batch, prefix: str = "") -> dict[str, jax.Array]:
    """`Loss.statistics` from the next values that each example gives (examples, ...): their weighted sums, by path."""

    def summed(value: jax.Array) -> jax.Array:
        weight = batch.get(WEIGHT, jnp.ones(len(value), jnp.float32))
        return jnp.tensordot(weight, value.astype(jnp.float32), 1, precision="highest")

    names = [prefix + name for name in jax.tree.leaves(paths(statistics))]
    return dict(zip(names, map(summed, jax.tree.leaves(statistics)), strict=True))
