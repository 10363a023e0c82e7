"""The update of the parameters, from gradients to the values that are added.

In this order: clip the gradients, compute the optimizer's direction, add decoupled weight decay, multiply by the
learning rate and, with `ema`, update the average of the parameters.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from dtrain.core.errors import FieldError
from dtrain.models.nn.param import Param, Tree, trained
from dtrain.optim.by_group import average_decays, by_group, clipped, groups_of, only, scheduled
from dtrain.optim.custom import CustomOptimizer
from dtrain.optim.optimizer import Optimizer

if TYPE_CHECKING:
    import optax

Rate = Callable[[Any], jax.Array]
"""step → learning rate."""


class Average(NamedTuple):
    """The exponential moving average of the parameters, part of the optimizer's state."""

    averaged: Tree


class PlateauScale(NamedTuple):
    """What a schedule of kind plateau multiplies the learning rate by, part of the optimizer's state."""

    plateau_scale: Any
    """float32 ()."""


def transformation(optimizer: Optimizer, declared: Tree, steps: int) -> "optax.GradientTransformationExtraArgs":
    """The update as one optax transformation, whose updates are added to the parameters.

    It is for the trained parameters alone: the trees that it takes have None in place of the others. Its `update` takes
    `step`, the number of the step, from which the learning rate follows.
    """
    import optax

    declared = trained(declared, declared)

    def decays(param: Param) -> bool:
        return (optimizer.decay_all or param.decay) if param.weight_decay is None else param.weight_decay

    rate = learning_rate(optimizer, steps)
    optimizer.refuse_unfit(declared)

    def body(settings: Optimizer, declared: Tree) -> "list[optax.GradientTransformation]":
        """Direction, weight decay and learning rate for these parameters."""
        mask = jax.tree.map(decays, declared)
        decayed = optax.add_decayed_weights(settings.decay, mask) if settings.decay else None
        if isinstance(settings, CustomOptimizer):  # its updates have the learning rate and the sign of a step already
            own = settings.complete(rate, declared)
            return [own, _beside(decayed, rate)] if decayed else [own]
        return [settings.direction(declared), *([decayed] if decayed else []), _by_rate(rate)]

    apart = {f"group{number}": group for number, group in enumerate(optimizer.groups) if group.apart}
    others = groups_of(declared) - {group.match for group in apart.values()}
    parts = {}
    for name, group in apart.items():
        own = body(optimizer.of_group(group.match), only(declared, declared, {group.match}))
        parts[name] = {group.match}, scheduled(group, optax.chain(*own))
    if parts and others:
        parts["others"] = others, optax.chain(*body(optimizer, only(declared, declared, others)))
    links = [
        clipped(optimizer, declared),
        *([by_group(parts, declared)] if parts else body(optimizer, declared)),
        _by_multiplier(declared) if any(param.lr != 1 for param in jax.tree.leaves(declared)) else None,
        _by_plateau() if optimizer.schedule.watch else None,
    ]
    whole = optax.chain(*(link for link in links if link))

    def moved(updates: Tree, state: Any, params: Tree = None, **more: Any) -> tuple[Tree, Any]:
        computed, state = whole.update(zero_frozen(updates, declared), state, params, **more)
        return jax.tree.map(_by_sign, computed, updates, declared), state

    stepped = optax.GradientTransformationExtraArgs(whole.init, moved)
    of_averages = average_decays(optimizer, declared)
    return optax.chain(stepped, _keep_average(of_averages)) if jax.tree.leaves(of_averages) else stepped


def _by_rate(rate: Rate) -> "optax.GradientTransformationExtraArgs":
    """Multiply updates by the negative learning rate of `step`: the reported one, even if updates were skipped."""
    import optax

    def update(updates: Tree, state: object, params: Tree = None, **more: Any) -> tuple[Tree, Any]:
        step = more["step"]
        return jax.tree.map(lambda u: -rate(step).astype(u.dtype) * u, updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


def _beside(decayed: "optax.GradientTransformation", rate: Rate) -> "optax.GradientTransformationExtraArgs":
    """Subtract the learning rate times what weight decay adds to a zero update."""
    import optax

    def update(updates: Tree, state: Any, params: Tree = None, **more: Any) -> tuple[Tree, Any]:
        decay, state = decayed.update(jax.tree.map(jnp.zeros_like, updates), state, params)
        now = rate(more["step"])
        return jax.tree.map(lambda u, d: u - now.astype(u.dtype) * d, updates, decay), state

    return optax.GradientTransformationExtraArgs(decayed.init, update)


def _by_plateau() -> "optax.GradientTransformation":
    """Multiply updates by the scale in the state, which the run lowers between steps."""
    import optax

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return jax.tree.map(lambda u: state.plateau_scale.astype(u.dtype) * u, updates), state

    def init(params: Tree) -> PlateauScale:
        return PlateauScale(jnp.ones((), jnp.float32))

    return optax.GradientTransformation(init, update)


def plateau_scale(optimizer_state: object) -> Any:
    """What the learning rate is multiplied by, float32 (); None without a schedule of kind plateau."""
    import optax

    return optax.tree_utils.tree_get(optimizer_state, "plateau_scale")


def with_plateau_scale(optimizer_state: Any, scale: Any) -> Any:
    """The state with another scale."""
    import optax

    return optax.tree_utils.tree_set(optimizer_state, plateau_scale=scale)


def _by_multiplier(declared: Tree) -> "optax.GradientTransformation":
    """Multiply the update of each parameter by its own `lr`."""
    import optax

    return optax.stateless(lambda updates, _: jax.tree.map(lambda u, param: param.lr * u, updates, declared))


def zero_frozen(gradients: Tree, declared: Tree) -> Tree:
    """The gradients, with zeros for parameters that move by their own `rate`."""
    return jax.tree.map(lambda g, param: g if param.rate is None else jnp.zeros_like(g), gradients, declared)


def _by_sign(update: jax.Array, gradient: jax.Array, param: Param) -> jax.Array:
    """The update; for a parameter with a `rate`, that much against the sign of its gradient."""
    return update if param.rate is None else -param.rate * jnp.sign(gradient)


FITTING = "optimizer.schedule.warmup=0.1 is a tenth of a run of any length"


def learning_rate(optimizer: Optimizer, steps: int) -> Rate:
    """The learning rate at each step of a run of `steps`; FieldError if the warm-up is not shorter than the run."""
    schedule = optimizer.schedule
    warmup = schedule.warmup_steps(steps)
    if warmup >= steps:
        message = f"a warm-up of {warmup} steps in a run of {steps}; it must be shorter than the run"
        raise FieldError("schedule.warmup", message, FITTING)

    def rate(step: object) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        rise = jnp.minimum(1.0, (step + 1) / (warmup + 1))
        return optimizer.lr * rise * schedule.fraction(step, steps)

    return rate


def _keep_average(decays: Tree) -> "optax.GradientTransformationExtraArgs":
    """Pass updates on unchanged and average the parameters that result from them, in at least float32.

    `decays`: for each parameter, None where no average is kept. At step t, counted from 0, the decay is at most
    (1 + t) / (10 + t): the average starts from the initial values, which would otherwise outweigh what a run of fewer
    than 1 / (1 - decay) steps learns.
    """
    import optax

    def chosen(tree: Tree) -> Tree:
        return jax.tree.map(lambda decay, leaf: None if decay is None else leaf, decays, tree, is_leaf=_is_none)

    def update(updates: Tree, state: Any, params: Tree = None, **more: Any) -> tuple[Tree, Average]:
        moved = chosen(optax.apply_updates(params, updates))
        step = jnp.asarray(more["step"], jnp.float32)

        def mix(decay: float, old: jax.Array, new: jax.Array) -> jax.Array:
            now = jnp.minimum(decay, (1 + step) / (10 + step))
            return now.astype(old.dtype) * old + (1 - now).astype(old.dtype) * new.astype(old.dtype)

        return updates, Average(jax.tree.map(mix, decays, state.averaged, moved))

    def init(params: Tree) -> Average:
        return Average(jax.tree.map(lambda p: p.astype(jnp.promote_types(p.dtype, jnp.float32)), chosen(params)))

    return optax.GradientTransformationExtraArgs(init, update)


def _is_none(leaf: object) -> bool:
    return leaf is None


def averaged(optimizer_state: object, params: Tree) -> Tree:
    """The averaged parameters if the optimizer's state has them, else the parameters; those not trained as they are."""
    import optax

    average = optax.tree_utils.tree_get(optimizer_state, "averaged")
    if average is None or params is None:
        return params if average is None else average
    return jax.tree.map(
        lambda mean, param: param if mean is None else mean, average, params, is_leaf=lambda leaf: leaf is None
    )
