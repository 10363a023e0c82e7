"""Rotary position embeddings (Su et al. 2021) and their scalings for longer contexts.

Dims: B batch, T tokens, H heads, D head dim, P pairs of values: D / 2.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Gt, Le

from dtrain.core.errors import FieldError
from dtrain.core.types import NonNegative, Positive, PositiveFloat
from dtrain.models.nn.matmul import on_tpu


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Divide every position by `factor` (Chen et al. 2023, position interpolation)."""

    attention: ClassVar[float] = 1.0
    """Factor of queries and keys."""
    scores: ClassVar[float] = 1.0
    """Factor of attention scores."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat
    """Divisor of the positions."""

    def frequencies(self, plain: np.ndarray, theta: float) -> np.ndarray:
        return plain / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """Divide low frequencies by `factor`, keep high ones, interpolate between (Dubey et al. 2024; Llama 3.1's code)."""

    attention: ClassVar[float] = 1.0
    scores: ClassVar[float] = 1.0

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat = 8.0
    """Divisor of the low frequencies."""
    low: PositiveFloat = 1.0
    """Frequencies with fewer rotations in the original context are divided."""
    high: PositiveFloat = 4.0
    """Frequencies with more rotations are kept."""
    original: Positive = 8192
    """Context length of the pretraining."""

    def __post_init__(self) -> None:
        if self.high <= self.low:
            raise FieldError("high", f"high = {self.high} is not above low = {self.low}")

    def frequencies(self, plain: np.ndarray, theta: float) -> np.ndarray:
        turns = self.original * plain / (2 * math.pi)  # full rotations within the original context
        kept = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return kept * plain + (1 - kept) * plain / self.factor


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Interpolate frequencies by their number of rotations in the original context (Peng et al. 2023, section 3.2)."""

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    """Divisor of the low frequencies."""
    original: Positive
    """Context length of the pretraining."""
    fast: PositiveFloat = 32.0
    """Frequencies with more rotations in the original context are kept."""
    slow: PositiveFloat = 1.0
    """Frequencies with fewer rotations are divided."""
    attention_factor: PositiveFloat | None = None
    """Factor of queries and keys; default: 0.1 log(factor) + 1 (Peng et al. 2023, section 3.4)."""
    mscale_all_dim: NonNegative = 0.0
    """Attention scores are multiplied by (0.1 x mscale_all_dim x log(factor) + 1) squared (DeepSeek)."""
    truncate: bool = True
    """Round the bounds of the frequencies that are interpolated to whole pairs; gpt-oss does not."""

    def frequencies(self, plain: np.ndarray, theta: float) -> np.ndarray:
        pairs = len(plain)

        # index of the pair that makes `turns` rotations: solve original x theta ** (-i / pairs) = 2 pi turns for i
        def pair(turns: float) -> float:
            return pairs * math.log(self.original / (turns * 2 * math.pi)) / math.log(theta)

        low, high = pair(self.fast), pair(self.slow)
        low, high = (math.floor(low), math.ceil(high)) if self.truncate else (low, high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        # an empty ramp (high < low) is divided by its negative length, as in transformers
        stretched = np.clip((np.arange(pairs) - low) / ((high - low) or 0.001), 0.0, 1.0)
        return plain * (1 - stretched) + plain / self.factor * stretched

    @property
    def attention(self) -> float:
        """Factor of queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def scores(self) -> float:
        """Factor of attention scores."""
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2 if self.factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotate queries and keys by angles proportional to their position."""

    kind: Literal["rope"] = "rope"
    theta: PositiveFloat = 10_000.0
    """Base of the wave lengths: larger ones for longer contexts."""
    scaling: LinearScaling | Llama3 | Yarn | None = None
    """For contexts longer than those of the pretraining."""
    partial: Annotated[float, Gt(0), Le(1)] = 1.0
    """The share of each head's values that is rotated, the first ones (GLM, StableLM)."""
    proportional: bool = False
    """With `partial`: rotate the first pairs of all i and i + half, at the frequencies that they have when all are
    rotated (Gemma 4), in place of the first values."""
    interleaved: bool = False
    """Rotate neighbouring values 2i and 2i + 1 (Cohere, GLM) in place of i and i + half."""

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise FieldError("theta", f"theta = {self.theta}; it must be above 1")
        if self.proportional and (self.interleaved or self.partial == 1):
            raise FieldError("proportional", "proportional needs partial below 1, and interleaved: false")

    def rotates(self, dim: int) -> int:
        """How many of a head's `dim` values are rotated; with `proportional` some of them by no angle."""
        return dim if self.proportional else int(dim * self.partial)

    def waves(self, position_BT: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine of every angle: (B, T, P) each."""
        dim = self.rotates(dim)
        plain = self.theta ** (-np.arange(0, dim, 2) / dim)
        if self.proportional:
            plain[int(dim * self.partial) // 2 :] = 0.0
        frequency = self.scaling.frequencies(plain, self.theta) if self.scaling else plain
        size = self.scaling.attention if self.scaling else 1.0
        angle_BTP = position_BT[..., None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)[None, None]
        return jnp.cos(angle_BTP) * size, jnp.sin(angle_BTP) * size


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A learned vector for each position, added to the embedding."""

    kind: Literal["learned"] = "learned"


@dataclass(frozen=True, kw_only=True)
class NoPosition:
    """Queries and keys are not rotated: the causal mask alone shows the order (Kazemnejad et al. 2023)."""

    kind: Literal["none"] = "none"


def rotated(x_BTHD: jax.Array, waves: tuple[jax.Array, jax.Array], interleaved: bool = False) -> jax.Array:
    """Rotate each pair of values i and i + P of a head by its angle, or 2i and 2i + 1; values from 2P on stay.

    Pairs are halves apart in most checkpoints of Hugging Face; Su et al. 2021 pair neighbours.
    """
    cos, sin = (wave[:, :, None, :] for wave in waves)
    pairs, rest = cos.shape[-1], x_BTHD.shape[-1] - 2 * cos.shape[-1]
    if on_tpu():
        whole = _whole(cos, interleaved, rest, constant=1), _whole(sin, interleaved, rest, constant=0)
        return _rotated_by_product(x_BTHD, *whole, pairs, interleaved)
    x_BTHD, kept = (x_BTHD[..., : 2 * pairs], x_BTHD[..., 2 * pairs :]) if rest else (x_BTHD, None)
    wide = x_BTHD.astype(jnp.float32)
    left, right = (wide[..., ::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    out = jnp.stack(turned, -1).reshape(x_BTHD.shape) if interleaved else jnp.concatenate(turned, -1)
    out = out.astype(x_BTHD.dtype)
    return out if kept is None else jnp.concatenate([out, kept], -1)


def _whole(wave: jax.Array, interleaved: bool, rest: int, constant: int) -> jax.Array:
    """The wave of each value of a head (..., D), from those of the pairs; `constant` for the `rest` of the values."""
    both = jnp.repeat(wave, 2, axis=-1) if interleaved else jnp.concatenate([wave, wave], -1)
    return jnp.pad(both, [(0, 0)] * (both.ndim - 1) + [(0, rest)], constant_values=constant) if rest else both


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rotated_by_product(x: jax.Array, cos: jax.Array, sin: jax.Array, pairs: int, interleaved: bool) -> jax.Array:
    """`rotated` for waves of D values, with pairs swapped by a product: x cos + (-right, left) sin.

    XLA:TPU computes the product and the rest in one pass over memory; halves of a head that are split and joined again
    take three. Each sum in the product has one term that is not zero, so it is exact.
    """
    return (x.astype(jnp.float32) * cos + _swapped(x, pairs, interleaved).astype(jnp.float32) * sin).astype(x.dtype)


def _swapped(x: jax.Array, pairs: int, interleaved: bool) -> jax.Array:
    """(-right, left) for each of the first `pairs` pairs (left, right) of the last dim, zero for the rest of it."""
    left = np.arange(pairs) * (2 if interleaved else 1)
    right = left + (1 if interleaved else pairs)
    matrix = np.zeros((x.shape[-1],) * 2)
    matrix[left, right], matrix[right, left] = 1, -1
    return jnp.matmul(x, jnp.asarray(matrix, x.dtype), precision="highest")


def _rotated_forward(
    x: jax.Array, cos: jax.Array, sin: jax.Array, pairs: int, interleaved: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rotated_by_product(x, cos, sin, pairs, interleaved), (cos, sin)


def _rotate_back(
    pairs: int, interleaved: bool, waves: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    cos, sin = waves
    return _rotated_by_product(gradient, cos, -sin, pairs, interleaved), None, None


_rotated_by_product.defvjp(_rotated_forward, _rotate_back)
