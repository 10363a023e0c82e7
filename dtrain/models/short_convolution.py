"""A gated convolution over a few tokens, in place of attention in some layers (Liquid AI 2025, LFM2).

Dims: B batch, T tokens, E embed, C channels, W taps of the convolution.
"""

from dataclasses import dataclass

import jax

from dtrain.core.types import Positive
from dtrain.models.nn.context import Context
from dtrain.models.nn.delta_rule import short_convolution
from dtrain.models.nn.kv_cache import Kept, KeptLayer
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.param import Init, Param, Tree, uniform

GATES = ("before", "after", "value")
"""The matrices from the activations: gates before and after the convolution, and what is convolved."""


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """Each channel of the activations is convolved for itself, between two gates."""

    taps: Positive = 3
    """Tokens that the convolution reads, its own included."""

    def products(self, width: int) -> int:
        """Multiplications for each token, beside those with matrices."""
        return self.taps * width

    def params(self, width: int, inner: Init, outer: Init) -> Tree:
        """Matrices from the activations, taps, the matrix back. Channels are split as heads are."""
        tree: Tree = {name: Param((width, width), "embed heads", inner, fan_in=("embed",)) for name in GATES}
        tree["taps"] = Param((width, self.taps), "heads _", uniform(self.taps**-0.5), decay=False)
        tree["out"] = Param((width, width), "heads embed", outer, fan_in=("heads",))
        return tree

    def apply(
        self, own: Tree, y_BTE: jax.Array, document_BT: jax.Array | None, epsilon: float, ctx: Context
    ) -> jax.Array:
        """(B, T, E), summed over this device's share of the channels only."""
        del epsilon  # it has no normalisation
        before_BTC, after_BTC, x_BTC = (
            ctx.shard(matmul(y_BTE, own[name]), "batch", "length", "heads") for name in GATES
        )
        x_BTC = ctx.preceding(before_BTC * x_BTC, self.taps - 1, "value")
        return matmul(after_BTC * short_convolution(x_BTC, own["taps"], document_BT), own["out"], name="out")

    def kept(self, width: int, rows: int) -> KeptLayer:
        """The last tokens of the convolution; there is no other state."""
        return {"value": Kept((rows, self.taps - 1, width), (None, None, "heads"))}, None
