"""One training step and one evaluation step, as functions to be compiled."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dtrain.data.batch import Batch
from dtrain.models.nn.context import Context
from dtrain.models.nn.model import Loss, Model
from dtrain.models.nn.param import Tree
from dtrain.models.nn.precision import Precision
from dtrain.optim.update import Rate, averaged, zero_frozen
from dtrain.parallel.engine import Grads, LossFn, Sums
from dtrain.train.state import State

if TYPE_CHECKING:
    import optax

Metrics = dict[str, jax.Array]
Prepare = Callable[[Batch], Batch]


def loss_of(model: Model, prepare: Prepare, precision: Precision) -> LossFn:
    """The model's loss on prepared examples, each number in its precision."""
    declared = model.params()

    def loss(params: Tree, batch: Batch, ctx: Context) -> Loss:
        ctx = dataclasses.replace(ctx, loss_dtype=precision.loss)  # pyright: ignore[reportArgumentType]
        return model.loss(precision.cast(params, declared), precision.cast_batch(prepare(batch)), ctx)

    return loss


def train_step(
    grads: Grads, update: "optax.GradientTransformationExtraArgs", rate: Rate, declared: Tree, *, skip: bool = False
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """(state, batch) → the next state and the metrics of this step.

    With `skip`, an update from a loss or gradients that are not finite is left out.
    """
    import optax

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        found, gradients = grads(state.params, batch)
        weight = divisor(found.weight)
        gradients = jax.tree.map(lambda g: g / weight.astype(g.dtype), gradients)
        norm = optax.tree.norm(zero_frozen(gradients, declared))
        finite = jnp.isfinite(found.sum) & jnp.isfinite(norm)

        def updated() -> tuple[Tree, Any]:
            updates, optimizer = update.update(gradients, state.optimizer, state.params, step=state.step)
            return optax.apply_updates(state.params, updates), optimizer

        kept = lambda: (state.params, state.optimizer)  # noqa: E731
        params, optimizer = jax.lax.cond(finite, updated, kept) if skip else updated()
        metrics = means(found) | {"grad_norm": norm, "lr": rate(state.step), "finite": finite}
        return State(state.step + 1, params, optimizer), metrics

    return step


def eval_step(sums: Sums) -> Callable[[State, Batch], Loss]:
    """(state, batch) → sums over the batch, with the averaged parameters where they are kept."""

    def step(state: State, batch: Batch) -> Loss:
        return sums(averaged(state.optimizer, state.params), batch)

    return step


def means(found: Loss) -> dict[str, Any]:
    """Loss and metrics as means over what was weighed; 0 where nothing was."""
    weight = divisor(found.weight)
    return {name: value / weight for name, value in {"loss": found.sum, **found.metrics}.items()}


def divisor(weight: jax.Array) -> jax.Array:
    """What sums are divided by: their weight, or 1 where that is 0 and the sums with it."""
    return jnp.where(weight > 0, weight, 1)
