"""Draw the next token of a text from the logits."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dtrain.core.errors import FieldError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled from the logits."""

    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int | None = None
    """Sample only from the `top_k` most likely tokens."""
    top_p: float | None = None
    """Sample only from the most likely tokens that together have this probability (Holtzman et al. 2020)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise FieldError("", f"temperature = {self.temperature}: expected a finite number, 0 or above")
        if self.top_k is not None and self.top_k < 1:
            raise FieldError("", f"top-k = {self.top_k}: expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise FieldError("", f"top-p = {self.top_p}: expected a number above 0 and at most 1")

    def draw(self, logits_BV: jax.Array, number: jax.Array) -> jax.Array:
        """The next token of each row (B,); `number` counts the tokens sampled before it, and seeds this one."""
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        scaled_BV = logits_BV / self.temperature
        if self.top_k is not None:
            top_BK, index_BK = jax.lax.top_k(scaled_BV, min(self.top_k, scaled_BV.shape[-1]))
            scaled_BV = _scattered(top_BK, index_BK, scaled_BV)
        if self.top_p is not None:
            scaled_BV = _nucleus(scaled_BV, self.top_p)
        return jax.random.categorical(jax.random.fold_in(jax.random.key(self.seed), number), scaled_BV)


def _nucleus(logits_BV: jax.Array, top_p: float) -> jax.Array:
    """Keep the logits of the smallest set of tokens whose probabilities reach `top_p`; -inf for the rest.

    A token is kept if the tokens before it, by descending logit, have less than `top_p`; equal logits keep their order.
    """
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, -1)
    before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV, -1), -1) - jax.nn.softmax(sorted_BV, -1)
    return _scattered(jnp.where(before_BV < top_p, sorted_BV, -jnp.inf), order_BV, logits_BV)


def _scattered(values_BK: jax.Array, index_BK: jax.Array, like_BV: jax.Array) -> jax.Array:
    """An array shaped as `like_BV` with the values at their indices in each row, -inf elsewhere."""
    row_B1 = jnp.arange(like_BV.shape[0])[:, None]
    return jnp.full_like(like_BV, -jnp.inf).at[row_B1, index_BK].set(values_BK)
