"""Latent attention: the keys and values of all heads from one small vector for each token (DeepSeek-AI 2024, section
2.1).

Dims: B batch, T tokens, E embed, H heads, D head dim, R rank of the vector, N values of a head that are not rotated,
P those that are, V values of a head's values.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.core.types import Positive, PositiveFloat
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import normalised, scale
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.param import Init, Param, Tree
from dtrain.models.rope import Rope, rotated

LATENT = "latent"
"""The matrices of `Latent.params` in the parameters of a layer."""


class Attended(NamedTuple):
    """Queries, keys and values, and how many of each key's values are those of its value; None: none."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    shared: int | None


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Each token has one vector, from which the keys and values of all heads are computed."""

    rank: Positive
    """Values of that vector. Generation keeps it, and the rotated part of the key, in place of keys and values."""
    query_rank: Positive | None = None
    """Values of a vector from which the queries of all heads are computed; default: they come from the activations."""
    rotated: Positive
    """Values of each head, the last ones, that are rotated; those of the keys are the same for all heads."""
    value_dim: Positive | None = None
    """Values per head of what attention adds up; default: those of a head that are not rotated."""
    epsilon: PositiveFloat = 1e-6
    """Added to the variance in the normalisations of the two vectors."""

    def values(self, dim: int) -> int:
        """Values of each head's values, of heads of `dim` values in queries and keys."""
        return self.value_dim or dim - self.rotated

    def params(self, width: int, heads: int, dim: int, inner: Init) -> Tree:
        """The matrices down to the vectors and up from that of keys and values, and the scales of the vectors."""
        up = heads, dim - self.rotated + self.values(dim)
        tree: Tree = {
            "down": Param((width, self.rank + self.rotated), "embed _", inner, fan_in=("embed",)),
            "scale": scale((self.rank,), "_"),
            "up": Param((self.rank, *up), "embed heads _", inner, fan_in=("embed",)),
        }
        if self.query_rank:
            tree["query_down"] = Param((width, self.query_rank), "embed _", inner, fan_in=("embed",))
            tree["query_scale"] = scale((self.query_rank,), "_")
        return tree

    def attended(
        self, block: Tree, y_BTE: jax.Array, rope: Rope | None, waves: tuple[jax.Array, jax.Array] | None, ctx: Context
    ) -> Attended:
        """What attention takes: q and k (B, T, H, D), v (B, T, H, V).

        Where keys are kept, q is (B, T, H, R + P) and k (B, T, 1, R + P): the matrix from the vector to the keys is
        multiplied with the queries instead (DeepSeek-AI 2024, appendix C), and `from_values` gives the result.
        """
        own = block[LATENT]

        def turned(x_BTHP: jax.Array) -> jax.Array:
            return x_BTHP if rope is None or waves is None else rotated(x_BTHP, waves, rope.interleaved)

        x_BTR = y_BTE
        if self.query_rank:
            x_BTR = self._norm(own["query_scale"], matmul(y_BTE, own["query_down"]))
        q_BTHD = ctx.shard(matmul(x_BTR, block["query"]["weight"], name="query"), "batch", "length", "heads", None)
        q_BTHN, q_BTHP = jnp.split(q_BTHD, [q_BTHD.shape[-1] - self.rotated], -1)
        q_BTHP = turned(q_BTHP)
        both = matmul(y_BTE, own["down"])
        c_BTR = self._norm(own["scale"], both[..., : self.rank])
        k_BT1P = turned(both[..., None, self.rank :])
        if ctx.keeps_keys:
            to_keys_RHN = own["up"][..., : q_BTHN.shape[-1]]
            q_BTHR = jnp.einsum("BTHN,RHN->BTHR", q_BTHN, to_keys_RHN)
            k_BT1R = jnp.concatenate([c_BTR[:, :, None], k_BT1P], -1)
            return Attended(jnp.concatenate([q_BTHR, q_BTHP], -1), k_BT1R, c_BTR[:, :, None], self.rank)
        up_BTHX = ctx.shard(matmul(c_BTR, own["up"]), "batch", "length", "heads", None)
        k_BTHN, v_BTHV = jnp.split(up_BTHX, [q_BTHN.shape[-1]], -1)
        k_BTHP = jnp.broadcast_to(k_BT1P, (*k_BTHN.shape[:3], self.rotated))
        k_BTHD = checkpoint_name(jnp.concatenate([k_BTHN, k_BTHP], -1), "key")
        q_BTHD = jnp.concatenate([q_BTHN, q_BTHP], -1)
        return Attended(q_BTHD, k_BTHD, checkpoint_name(v_BTHV, "value"), None)

    def from_values(self, block: Tree, y_BTHR: jax.Array, dim: int) -> jax.Array:
        """(B, T, H, V) from what attention to vectors gives (B, T, H, R)."""
        return jnp.einsum("BTHR,RHV->BTHV", y_BTHR, block[LATENT]["up"][..., dim - self.rotated :])

    def _norm(self, factor: jax.Array, x: jax.Array) -> jax.Array:
        return normalised({"scale": factor}, x, "rms", self.epsilon, offset=False)
