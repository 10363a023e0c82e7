"""Optimizers and schedules: recipe sections that become optax transformations.

An update is: clip the gradients, find the optimizer's direction, add decoupled weight decay, scale
by the learning rate, and, where asked, keep an average of the parameters beside them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dtrain.errors import FieldError
from dtrain.fields import Decay, Fraction, Natural, NonNegative, PositiveFloat
from dtrain.params import Param, Tree

if TYPE_CHECKING:
    import optax

Rate = Callable[[Any], jax.Array]
"""step → learning rate."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The peak from the end of the warm-up on."""

    kind: Literal["constant"] = "constant"
    warmup: Natural = 0
    """Steps of linear rise from zero."""

    def fraction(self, step: jax.Array, steps: int) -> jax.Array:
        return jnp.ones_like(step)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Half a cosine from the peak to `final` of it (Loshchilov & Hutter 2017)."""

    kind: Literal["cosine"] = "cosine"
    warmup: Natural = 0
    """Steps of linear rise from zero."""
    final: Fraction = 0.0
    """The last learning rate, as a fraction of the peak."""

    def fraction(self, step: jax.Array, steps: int) -> jax.Array:
        done = _progress(step, self.warmup, steps)
        return self.final + (1 - self.final) * 0.5 * (1 + jnp.cos(jnp.pi * done))


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A straight line from the peak to `final` of it."""

    kind: Literal["linear"] = "linear"
    warmup: Natural = 0
    """Steps of linear rise from zero."""
    final: Fraction = 0.0
    """The last learning rate, as a fraction of the peak."""

    def fraction(self, step: jax.Array, steps: int) -> jax.Array:
        return 1 - (1 - self.final) * _progress(step, self.warmup, steps)


@dataclass(frozen=True, kw_only=True)
class WSD:
    """Warm up, stay, and decay in a straight line at the end (Hu et al. 2024)."""

    kind: Literal["wsd"] = "wsd"
    warmup: Natural = 0
    """Steps of linear rise from zero."""
    cooldown: Fraction = 0.2
    """The part of the run that decays, at its end."""
    final: Fraction = 0.0
    """The last learning rate, as a fraction of the peak."""

    def fraction(self, step: jax.Array, steps: int) -> jax.Array:
        start = steps - max(1, round(self.cooldown * steps))
        return 1 - (1 - self.final) * _progress(step, start, steps)


Schedule = Constant | Cosine | Linear | WSD


def _progress(step: jax.Array, start: int, end: int) -> jax.Array:
    return jnp.clip((step - start) / max(end - start, 1), 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What every optimizer takes."""

    lr: PositiveFloat
    """Peak learning rate."""
    schedule: Schedule = field(default_factory=Constant)
    decay: NonNegative = 0.0
    """Decoupled weight decay, times the learning rate at each step."""
    decay_all: bool = False
    """Decay biases and normalisation scales too, not only matrices."""
    clip: PositiveFloat | None = None
    """Largest global norm of the gradients."""
    ema: Decay | None = None
    """Decay of an average of the parameters, which evaluation then uses."""


@dataclass(frozen=True, kw_only=True)
class AdamW(Shared):
    """Adam with decoupled decay (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"
    b1: Decay = 0.9
    b2: Decay = 0.999
    epsilon: PositiveFloat = 1e-8

    def direction(self, declared: Tree) -> "optax.GradientTransformation":
        import optax

        return optax.scale_by_adam(self.b1, self.b2, self.epsilon)


@dataclass(frozen=True, kw_only=True)
class SGD(Shared):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"] = "sgd"
    momentum: Decay = 0.9
    nesterov: bool = False

    def direction(self, declared: Tree) -> "optax.GradientTransformation":
        import optax

        return optax.trace(self.momentum, self.nesterov)


@dataclass(frozen=True, kw_only=True)
class Lion(Shared):
    """The sign of an interpolated momentum (Chen et al. 2023)."""

    kind: Literal["lion"] = "lion"
    b1: Decay = 0.9
    b2: Decay = 0.99

    def direction(self, declared: Tree) -> "optax.GradientTransformation":
        import optax

        return optax.scale_by_lion(self.b1, self.b2)


@dataclass(frozen=True, kw_only=True)
class Adafactor(Shared):
    """Second moments kept as rows and columns (Shazeer & Stern 2018); updates clipped to unit RMS."""

    kind: Literal["adafactor"] = "adafactor"
    factor_from: Natural = 128
    """Both of a matrix's larger dims must reach this for its moments to be factored."""

    def direction(self, declared: Tree) -> "optax.GradientTransformation":
        import optax

        moments = optax.scale_by_factored_rms(min_dim_size_to_factor=self.factor_from)
        return optax.chain(moments, optax.clip_by_block_rms(1.0))


@dataclass(frozen=True, kw_only=True)
class Muon(Shared):
    """Orthogonalised momentum for hidden matrices (Jordan et al. 2024), Adam for all else.

    Updates have the size of Adam's (Liu et al. 2025), so one learning rate serves both.
    """

    kind: Literal["muon"] = "muon"
    momentum: Decay = 0.95
    iterations: Natural = 5
    """Newton-Schulz iterations."""
    b1: Decay = 0.9
    b2: Decay = 0.999

    def direction(self, declared: Tree) -> "optax.GradientTransformation":
        import optax

        numbers = jax.tree.map(lambda param: _muon_dims(param) or optax.MaskedNode(), declared)
        labels = jax.tree.map(lambda param: "muon" if _muon_dims(param) else "adam", declared)
        muon = optax.contrib.scale_by_muon(
            ns_steps=self.iterations, beta=self.momentum, weight_dimension_numbers=lambda _: numbers
        )
        scales = jax.tree.map(_adam_size, declared, numbers)
        size = optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, scales))
        return optax.partition({"muon": optax.chain(muon, size), "adam": optax.scale_by_adam(self.b1, self.b2)}, labels)


Optimizer = AdamW | SGD | Lion | Adafactor | Muon


def _muon_dims(param: Param) -> Any:
    """Which dims are a hidden matrix's rows and columns; None for what is no hidden matrix."""
    import optax

    outer = {"layer", *param.fan_in}
    rows = tuple(i for i, name in enumerate(param.names) if name in param.fan_in)
    columns = tuple(i for i, name in enumerate(param.names) if name not in outer)
    if not (rows and columns and param.decay) or {"classes", "vocab"} & set(param.names):
        return None
    return optax.contrib.MuonDimensionNumbers(rows, columns)


def _adam_size(param: Param, dims: Any) -> Any:
    """What makes an orthogonal update as large as Adam's usual one (Liu et al. 2025, section 2.2)."""
    import optax

    if isinstance(dims, optax.MaskedNode):
        return dims
    rows, columns = (math.prod(param.shape[i] for i in part) for part in dims)
    return 0.2 * math.sqrt(max(rows, columns))


class Average(NamedTuple):
    """The average of the parameters, kept beside them in the optimizer's state."""

    averaged: Tree


def transformation(optimizer: Optimizer, declared: Tree, steps: int) -> "optax.GradientTransformation":
    """The whole update as one optax transformation; its updates are to be added to the parameters."""
    import optax

    mask = jax.tree.map(lambda param: optimizer.decay_all or param.decay, declared)
    links = [
        optax.clip_by_global_norm(optimizer.clip) if optimizer.clip else None,
        optimizer.direction(declared),
        optax.add_decayed_weights(optimizer.decay, mask) if optimizer.decay else None,
        optax.scale_by_learning_rate(learning_rate(optimizer, steps)),
        _keep_average(optimizer.ema) if optimizer.ema else None,
    ]
    return optax.chain(*(link for link in links if link))


def learning_rate(optimizer: Optimizer, steps: int) -> Rate:
    """The learning rate at each step of a run of `steps`; FieldError where the warm-up outlasts it."""
    schedule = optimizer.schedule
    if schedule.warmup >= steps:
        raise FieldError("schedule.warmup", f"warm-up of {schedule.warmup} steps in a run of {steps}")

    def rate(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        rise = jnp.minimum(1.0, (step + 1) / (schedule.warmup + 1))
        return optimizer.lr * rise * schedule.fraction(step, steps)

    return rate


def _keep_average(decay: float) -> "optax.GradientTransformation":
    import optax

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Average]:
        moved = optax.apply_updates(params, updates)
        mix = lambda old, new: (decay * old + (1 - decay) * new).astype(old.dtype)  # noqa: E731
        return updates, Average(jax.tree.map(mix, state.averaged, moved))

    return optax.GradientTransformation(lambda params: Average(jax.tree.map(jnp.copy, params)), update)


def averaged(optimizer_state: Any, params: Tree) -> Tree:
    """The averaged parameters where they are kept, else the parameters themselves."""
    import optax

    return optax.tree_utils.tree_get(optimizer_state, "averaged", params)
