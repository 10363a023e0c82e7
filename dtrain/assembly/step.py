"""One training step and one evaluation step, as functions to be compiled."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dtrain.assembly.state import State
from dtrain.data.batch import CALL, ROW, STEP, Batch
from dtrain.models.nn.context import Context
from dtrain.models.nn.examples import Purpose
from dtrain.models.nn.model import Loss, Model
from dtrain.models.nn.param import Param, Tree, averages_from, merged, paths, trained
from dtrain.models.nn.precision import Precision
from dtrain.optim.update import Rate, averaged, plateau_scale, zero_frozen
from dtrain.parallel.engine import Grads, LossFn, Outputs, OutputsFn, Sums

if TYPE_CHECKING:
    import optax

Metrics = dict[str, Any]
NORMS = "norms"
"""The metric that has, by kind (grad, update, param) and path, the norm of each parameter."""
GRADIENTS = "gradients"
"""The metric that has, by path, the gradient of the mean loss of each parameter that is trained."""
Prepare = Callable[[Batch], Batch]


def loss_of(
    model: Model,
    prepare: Prepare,
    precision: Precision,
    *,
    seed: int = 0,
    train: bool = True,
    mixed: list[str] | None = None,
) -> LossFn:
    """The model's loss as a function of (params, batch, ctx), on prepared examples, with the recipe's precision.

    `mixed` receives what compares examples with each other, when the loss is traced.
    """
    declared = model.params()

    def loss(params: Tree, batch: Batch, ctx: Context) -> Loss:
        about = {"loss_dtype": precision.loss, "train": train, "seed": seed, "mixed": [] if mixed is None else mixed}
        examples, ctx = _received(batch, ctx, prepare, about)
        examples = precision.cast_batch(examples, model.exact_inputs)
        return model.loss(precision.cast(params, declared), examples, ctx)

    return loss


def outputs_of(
    model: Model, prepare: Prepare, precision: Precision, *, seed: int = 0, purpose: Purpose = "prediction"
) -> OutputsFn:
    """The model's predictions, or its samples, as a function of (params, batch, ctx), on prepared examples."""
    declared = model.params()
    made = model.sample if purpose == "samples" else model.predict

    def outputs(params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        about = {"loss_dtype": precision.loss, "train": False, "seed": seed, "purpose": purpose}
        examples, ctx = _received(batch, ctx, prepare, about)
        return made(precision.cast(params, declared), precision.cast_batch(examples, model.exact_inputs), ctx)

    return outputs


def _received(batch: Batch, ctx: Context, prepare: Prepare, about: dict[str, Any]) -> tuple[Batch, Context]:
    """The prepared examples, and the context, as a model receives them."""
    batch = dict(batch)
    if STEP in batch:
        about |= {"step": batch.pop(STEP)[0]}
    ctx = dataclasses.replace(ctx, named=[], **about)  # pyright: ignore[reportArgumentType]
    rows = {ROW: batch[ROW]} if ROW in batch else {}  # data may leave it out once its own randomness is applied
    return prepare(batch) | rows, ctx


def _numbered(batch: Batch, state: State, keyed: bool) -> Batch:
    """The batch; with `keyed`, with the number of the step for each example, so that it is split as they are."""
    return batch | {STEP: jnp.full_like(batch[ROW], state.step, jnp.int32)} if keyed else batch


def train_step(
    grads: Grads,
    update: "optax.GradientTransformationExtraArgs",
    rate: Rate,
    declared: Tree,
    *,
    keyed: bool = False,
    skip: bool = False,
    norms_every: int = 0,
    gradients_too: bool = False,
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """(state, batch) → the next state and the metrics of this step.

    Gradients are of the mean loss: sums over the global batch, divided once by the sum of weights. Parameters that are
    not trained become what the loss gives as their statistics, and averages of others follow those. With `keyed`, the
    model gets the step's number. With `skip`, an update whose loss or gradients are not finite is skipped. With
    `norms_every`, the metrics have the `norms` of each parameter after so many steps, and zeros after others, where
    nothing is computed for them; with `gradients_too` they have the gradients.
    """
    import optax

    optimized = trained(declared, declared)

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        loss, gradients = grads(state.params, _numbered(batch, state, keyed))
        weight = divisor(loss.weight)
        gradients = jax.tree.map(lambda g: g / weight.astype(g.dtype), gradients)
        norm = optax.tree.norm(zero_frozen(gradients, optimized))
        finite = jnp.isfinite(loss.sum) & jnp.isfinite(norm)

        def updated() -> tuple[Tree, Any]:
            own = trained(state.params, declared)
            updates, optimizer = update.update(gradients, state.optimizer, own, step=state.step)
            params = merged(optax.apply_updates(own, updates), state.params, declared)
            return averages_from(_with_statistics(params, loss), declared, _moved), optimizer

        def unchanged() -> tuple[Tree, Any]:
            return (state.params, state.optimizer)

        params, optimizer = jax.lax.cond(finite, updated, unchanged) if skip else updated()
        scale = plateau_scale(state.optimizer)
        lr = rate(state.step) if scale is None else scale * rate(state.step)
        metrics = means(loss) | {"grad_norm": norm, "lr": lr, "finite": finite}
        if gradients_too:
            metrics[GRADIENTS] = {name: value for name, value, _ in _each(gradients)}
        if norms_every:
            due = (state.step + 1) % norms_every == 0
            metrics[NORMS] = jax.lax.cond(due, _norms, _no_norms, gradients, state.params, params)
        return State(state.step + 1, params, optimizer), metrics

    def _norms(gradients: Tree, before: Tree, after: Tree) -> Tree:
        moved = jax.tree.map(lambda old, new: new - old, before, after)
        kinds = {"grad": gradients, "update": moved, "param": after}
        return {
            kind: {name: parameter_norm(value, param) for name, value, param in _each(tree)}
            for kind, tree in kinds.items()
        }

    def _no_norms(gradients: Tree, before: Tree, after: Tree) -> Tree:
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(_norms, gradients, before, after))

    def _each(values: Tree) -> list[tuple[str, jax.Array, Param]]:
        """Path, value and declaration of each parameter that is trained; those that are not may be None in `values`."""
        trees = (paths(declared), values, declared)
        leaves = zip(*(jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None) for tree in trees), strict=True)
        return [leaf for leaf in leaves if leaf[2].trained]

    return step


def several_steps(step: Callable[[State, Batch], tuple[State, Metrics]]) -> Callable[[State, Batch], Any]:
    """(state, batches) → the state after the first CALL of the batches, and the metrics of each step, stacked.

    One loop serves any number of batches, so that the numbers do not depend on how many steps a call has.
    """

    def steps(state: State, batches: Batch) -> tuple[State, Metrics]:
        rows = {name: values for name, values in batches.items() if name != CALL}
        most = jax.tree.leaves(rows)[0].shape[0]

        def batch(number: jax.Array) -> Batch:
            return {name: jax.lax.dynamic_index_in_dim(values, number, keepdims=False) for name, values in rows.items()}

        def one(number: jax.Array, before: tuple[State, Metrics]) -> tuple[State, Metrics]:
            state, metrics = step(before[0], batch(number))
            return state, jax.tree.map(lambda rows, own: rows.at[number].set(own), before[1], metrics)

        _, shapes = jax.eval_shape(lambda state: step(state, batch(jnp.int32(0))), state)
        empty = jax.tree.map(lambda own: jnp.zeros((most, *own.shape), own.dtype), shapes)
        return jax.lax.fori_loop(0, batches[CALL], one, (state, empty))

    return steps


def parameter_norm(values: jax.Array, param: Param) -> jax.Array:
    """The Euclidean norm of a parameter's values; of a stack of layers one for each."""
    axes = tuple(range(1 if param.dims.split()[:1] == ["layer"] else 0, values.ndim))
    return jnp.sqrt(jnp.sum(jnp.square(values.astype(jnp.float32)), axis=axes))


def _with_statistics(params: Tree, loss: Loss) -> Tree:
    """The parameters, those in `loss.statistics` replaced by the means over the examples of the step."""
    if not loss.statistics:
        return params

    def value(name: str, param: jax.Array) -> jax.Array:
        if name not in loss.statistics:
            return param
        mean = loss.statistics[name] / divisor(loss.weight)
        return jnp.where(loss.weight > 0, mean, param).astype(param.dtype)

    return jax.tree.map(value, paths(params), params)


def _moved(decay: float, average: jax.Array, value: jax.Array) -> jax.Array:
    """An exponential moving average after one more value."""
    return decay * average + (1 - decay) * value


def eval_step(sums: Sums, keyed: bool = False) -> Callable[[State, Batch], Loss]:
    """(state, batch) → sums over the batch, with the averaged parameters if the optimizer keeps them."""

    def step(state: State, batch: Batch) -> Loss:
        params = averaged(state.optimizer, state.params)
        return sums(params, _numbered(batch, state, keyed))._replace(statistics={})

    return step


def loss_step(sums: Sums, keyed: bool = False) -> Callable[[State, Batch], Loss]:
    """(state, batch) → sums over a training batch, with the parameters themselves."""
    return lambda state, batch: sums(state.params, _numbered(batch, state, keyed))._replace(statistics={})


def predict_step(outputs: Outputs, keyed: bool = False) -> Callable[[State, Batch], dict[str, jax.Array]]:
    """(state, batch) → the outputs for each example, with the averaged parameters if the optimizer keeps them."""
    return lambda state, batch: outputs(averaged(state.optimizer, state.params), _numbered(batch, state, keyed))


def means(loss: Loss) -> dict[str, Any]:
    """Loss and metrics as weighted means; 0 if the total weight is 0."""
    weight = divisor(loss.weight)
    return {name: value / weight for name, value in {"loss": loss.sum, **loss.metrics}.items()}


def divisor(weight: jax.Array) -> jax.Array:
    """The weight to divide sums by, or 1 if it is 0: then the sums are 0 as well."""
    return jnp.where(weight > 0, weight, 1)
