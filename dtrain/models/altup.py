"""AltUp, alternating updates: several streams of activations between layers, one of which a layer computes with.

Before a layer, a small mix of the streams predicts all of them; after it, the others are corrected by what the layer
changed in its own (Baykal et al. 2023, as in Gemma 3n). Between layers the streams are side by side.
Dims: B batch, T tokens, E embed, N streams, S the values of all streams, N x E.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from dtrain.core.errors import FieldError
from dtrain.core.types import Natural, Positive, PositiveFloat
from dtrain.models.nn.layers import bias, lift, normalised
from dtrain.models.nn.low_rank import merged
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.param import Init, Param, Tree

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

ALTUP = "altup"
EXPAND, MERGE = "expand", "merge"
"""Outside of layers the matrices by which each further stream begins, and by which it is merged after all layers."""
LEAST = 1e-5
"""The least mean square by which a stream is divided."""


@dataclass(frozen=True, kw_only=True)
class AltUp:
    """Several streams of activations between layers."""

    streams: Positive = 4
    """How many there are."""
    active: Natural = 0
    """The number of the stream that layers compute with."""
    clip: PositiveFloat = 120.0
    """Bound, in training, of the coefficients by which streams are predicted and corrected."""

    def __post_init__(self) -> None:
        if self.streams < 2:
            raise FieldError("streams", f"streams = {self.streams}: 2 or more", "leave altup out for one stream")
        if self.active >= self.streams:
            message = f"active = {self.active} is none of the {self.streams} streams, which are 0 to {self.streams - 1}"
            raise FieldError("active", message)

    def outside(self, width: int, initial: Init) -> Tree:
        """The parameters before and after all layers."""
        numbers = [str(number) for number in range(1, self.streams)]
        matrix = Param((width, width), "embed _", initial, fan_in=("embed",))
        return {which: dict.fromkeys(numbers, matrix) for which in (EXPAND, MERGE)}

    def params(self, model: "Decoder", inner: Init) -> Tree:
        """Those of one layer, but for the normalisation before the router."""
        n, width = self.streams, model.width
        tree: Tree = {
            "router": Param((width, n), "embed _", inner, fan_in=("embed",)),
            "predict": Param((n, n * n), "stream _", inner, fan_in=("stream",)),
            "correct": Param((n, n), "stream _", inner, fan_in=("stream",)),
        }
        return tree | ({"scale": bias((width,), "embed")} if model.layer_inputs else {})

    def expanded(self, outside: Tree, x_BTE: jax.Array) -> jax.Array:
        """The streams (B, T, S) before the first layer: x, and projections of the same size."""
        size = _size(x_BTE, 0.0)
        others = [_sized(matmul(x_BTE, matrix), size) for matrix in outside[EXPAND].values()]
        return jnp.concatenate([x_BTE, *others], -1)

    def merged(self, outside: Tree, x_BTS: jax.Array) -> jax.Array:
        """(B, T, E), the mean of the streams after the last layer, of projections of the same size."""
        first_BTE, *others = self.apart(x_BTS)
        size = _size(first_BTE, 0.0)
        pairs = zip(others, outside[MERGE].values(), strict=True)
        return sum((_sized(matmul(x_BTE, matrix), size) for x_BTE, matrix in pairs), first_BTE) / self.streams

    def apart(self, x_BTS: jax.Array) -> list[jax.Array]:
        """The streams, (B, T, E) each."""
        return jnp.split(x_BTS, self.streams, -1)

    def predicted(self, model: "Decoder", own: Tree, streams: Sequence[jax.Array], train: bool) -> list[jax.Array]:
        """The streams as a layer finds them: each with a mix of all of them added."""
        mix_BTP = self._mix(model, own, streams[self.active], "predict", train)
        mixes = jnp.split(mix_BTP, self.streams, -1)  # for each stream the factors of all
        return [_sum(x_BTE, streams, mix_BTN) for x_BTE, mix_BTN in zip(streams, mixes, strict=True)]

    def corrected(
        self, model: "Decoder", own: Tree, predicted: Sequence[jax.Array], x_BTE: jax.Array, train: bool
    ) -> list[jax.Array]:
        """The streams after a layer that made x of the active one: each with a share of the difference added."""
        shares_BTN = self._mix(model, own, x_BTE, "correct", train) + 1
        difference = (x_BTE - predicted[self.active],)
        shares = jnp.split(shares_BTN, self.streams, -1)
        return [_sum(y_BTE, difference, share_BT1) for y_BTE, share_BT1 in zip(predicted, shares, strict=True)]

    def read(self, own: Tree, streams: Sequence[jax.Array]) -> jax.Array:
        """(B, T, E), what the inputs of a layer are gated by."""
        x_BTE = streams[self.active]
        return x_BTE * lift(own["scale"], x_BTE) if "scale" in own else x_BTE

    def _mix(self, model: "Decoder", own: Tree, x_BTE: jax.Array, name: str, train: bool) -> jax.Array:
        """Coefficients, float32, from the activations: through a router with tanh and a small matrix."""
        y_BTE = normalised(own["norm"], x_BTE, model.norm, model.epsilon, model.norm_offset) / model.width
        routed_BTN = jnp.tanh(matmul(y_BTE, own["router"]).astype(jnp.float32)).astype(x_BTE.dtype)
        matrix = own[name]
        if train:
            matrix = jnp.clip(merged(matrix), -self.clip, self.clip)
        return matmul(routed_BTN, matrix).astype(jnp.float32)


def _sum(x_BTE: jax.Array, others: Sequence[jax.Array], factors_BTN: jax.Array) -> jax.Array:
    """x and the others, each times its factor of a token: a few additions of whole arrays, not a matrix product."""
    total_BTE = x_BTE.astype(jnp.float32)
    for number, other_BTE in enumerate(others):
        total_BTE += other_BTE * factors_BTN[..., number : number + 1]
    return total_BTE.astype(x_BTE.dtype)


def _size(x_BTE: jax.Array, least: float) -> jax.Array:
    """The root of the mean square of each token, (B, T, 1), float32."""
    square_BT1 = jnp.square(x_BTE.astype(jnp.float32)).mean(-1, keepdims=True)
    return jnp.sqrt(jnp.maximum(square_BT1, max(least, 1e-30)))  # the root of zero has no gradient


def _sized(x_BTE: jax.Array, size_BT1: jax.Array) -> jax.Array:
    """x with that size."""
    return (x_BTE * (size_BT1 / _size(x_BTE, LEAST))).astype(x_BTE.dtype)
