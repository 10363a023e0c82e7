"""Linear attention by the gated delta rule, in place of attention in some layers (Yang et al. 2024; Qwen 3.5).

Dims: B batch, T tokens, E embed, G heads of queries and keys, H heads of values, K and V their values, W taps of the
short convolutions.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.core.types import Positive
from dtrain.models.nn.context import Context
from dtrain.models.nn.delta_rule import gated_delta_rule, short_convolution
from dtrain.models.nn.kv_cache import Kept, KeptLayer
from dtrain.models.nn.layers import added, lift, normalised, scale
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.param import Init, Param, Tree, uniform
from dtrain.models.nn.remat import ATTENTION

CONVOLVED = ("query", "key", "value")


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Each head of the values has a state of key_dim x value_dim values, which the tokens of a row change in turn."""

    key_heads: Positive
    """Heads of queries and keys."""
    value_heads: Positive
    """Heads of values, a multiple of `key_heads`: neighbours share a query and a key."""
    key_dim: Positive
    """Values per head of queries and keys."""
    value_dim: Positive
    """Values per head of values."""
    taps: Positive = 4
    """Tokens that the convolution of queries, keys and values reads, its own included."""

    def products(self, width: int) -> int:
        """Multiplications for each token, beside those with matrices: the state is read twice and added to."""
        del width
        return 3 * self.value_heads * self.key_dim * self.value_dim

    def params(self, width: int, inner: Init, outer: Init) -> Tree:
        """Matrices from the activations, taps, the decay of each head, the scale of the result, the matrix back."""
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        of_values = Param((width, *values), "embed heads _", inner, fan_in=("embed",))
        of_keys = Param((width, *keys), "embed kv_heads _", inner, fan_in=("embed",))
        of_heads = Param((width, self.value_heads), "embed heads", inner, fan_in=("embed",))
        tree: Tree = {"query": of_keys, "key": of_keys, "value": of_values, "gate": of_values}
        tree |= {"strength": of_heads, "decay": of_heads}
        for name, shape, head in zip(CONVOLVED, (keys, keys, values), ("kv_heads", "kv_heads", "heads"), strict=True):
            tree[f"{name}_taps"] = Param((*shape, self.taps), f"{head} _ _", uniform(self.taps**-0.5), decay=False)
        tree["rate"] = Param((self.value_heads,), "heads", initial_rate, decay=False, exact=True)
        tree["shift"] = Param((self.value_heads,), "heads", initial_shift, decay=False, exact=True)
        tree["scale"] = scale((self.value_dim,), "_")
        tree["out"] = Param((*values, width), "heads _ embed", outer, fan_in=("heads", "_"))
        return tree

    def apply(
        self, own: Tree, y_BTE: jax.Array, document_BT: jax.Array | None, epsilon: float, ctx: Context
    ) -> jax.Array:
        """(B, T, E), summed over this device's share of the heads only."""

        def project(name: str, head: str) -> jax.Array:
            return ctx.shard(matmul(y_BTE, own[name], name=name), "batch", "length", head, None)

        def convolved(name: str, head: str) -> jax.Array:
            x_BTHK = ctx.preceding(project(name, head), self.taps - 1, name)
            return jax.nn.silu(short_convolution(x_BTHK.astype(jnp.float32), own[f"{name}_taps"], document_BT))

        v_BTHV = convolved("value", "heads")
        q_BTGK, k_BTGK = (
            self._own_keys(unit(convolved(name, "kv_heads")), v_BTHV.shape[2], ctx) for name in ("query", "key")
        )
        groups = q_BTGK.shape[2]

        def by_group(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])

        def of_head(name: str) -> jax.Array:
            return ctx.shard(matmul(y_BTE, own[name], dtype="float32", narrow=False), "batch", "length", "heads")

        strength_BTGR = by_group(jax.nn.sigmoid(of_head("strength")))
        # float32 throughout: the decays of many tokens are multiplied
        rate_H, shift_H = (own[name].astype(jnp.float32) for name in ("rate", "shift"))
        step_BTH = jax.nn.softplus(added(of_head("decay"), shift_H))
        decay_BTH = -lift(jnp.exp(rate_H), step_BTH) * step_BTH
        v_BTGRV = by_group(v_BTHV)
        state_BGRKV = jnp.zeros((len(y_BTE), *v_BTGRV.shape[2:4], self.key_dim, self.value_dim), jnp.float32)

        def rule(state_BGRKV: jax.Array) -> tuple[jax.Array, jax.Array]:
            scaled_BTGK = q_BTGK * self.key_dim**-0.5
            decay_BTGR = by_group(decay_BTH)
            return gated_delta_rule(scaled_BTGK, k_BTGK, v_BTGRV, decay_BTGR, strength_BTGR, state_BGRKV, document_BT)

        out_BTHV = ctx.recurrent(rule, state_BGRKV).reshape(v_BTHV.shape).astype(y_BTE.dtype)
        out_BTHV = normalised(
            {"scale": own["scale"]}, checkpoint_name(out_BTHV, ATTENTION), "rms", epsilon, offset=False
        )
        gate_BTHV = jax.nn.silu(project("gate", "heads").astype(jnp.float32))
        return matmul((out_BTHV * gate_BTHV).astype(y_BTE.dtype), own["out"], contract_dims=2, name="out")

    def _own_keys(self, x_BTGK: jax.Array, heads: int, ctx: Context) -> jax.Array:
        """Queries or keys for this device's `heads` of values. Where each device has all of them (`mesh.rules`), they
        are taken one by one for its heads."""
        shared, groups = self.value_heads // self.key_heads, x_BTGK.shape[2]
        if heads == groups * shared:
            return x_BTGK
        own_H = (ctx.first("heads", heads) + jnp.arange(heads)) // shared
        return jnp.take(x_BTGK, own_H - ctx.first("kv_heads", groups), axis=2)

    def kept(self, width: int, rows: int) -> KeptLayer:
        """The last tokens of the convolutions, and the state of each head."""
        del width
        keys, values = ("kv_heads", (self.key_heads, self.key_dim)), ("heads", (self.value_heads, self.value_dim))
        tokens = {
            name: Kept((rows, self.taps - 1, *shape), (None, None, head, None))
            for name, (head, shape) in zip(CONVOLVED, (keys, keys, values), strict=True)
        }
        state = (rows, self.key_heads, self.value_heads // self.key_heads, self.key_dim, self.value_dim)
        return tokens, Kept(state, (None, "kv_heads", None, None, None), "float32")


def unit(x: jax.Array) -> jax.Array:
    """x (..., K) divided by its length, with a small number under the root as in Qwen's code."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


def initial_rate(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The logarithm of rates of decay between 0.01 and 16 (Gu and Dao 2023)."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16))


def initial_shift(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of softplus of steps between 0.001 and 0.1, by their logarithm (Gu and Dao 2023)."""
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, jnp.log(0.001), jnp.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))
