"""How the learning rate moves: each schedule is a fraction of the peak at a step of a run."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from dtrain.core.types import Fraction, Natural


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
