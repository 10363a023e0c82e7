"""A state-space layer, Mamba-2, in place of attention in some layers (Dao and Gu 2024; Granite 4).

Dims: B batch, T tokens, E embed, G groups, R heads of a group, H heads, K values of a state for each value V of a
head, W taps of the short convolutions.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.core.errors import FieldError, RecipeError
from dtrain.core.types import Positive
from dtrain.models.delta import initial_rate, initial_shift
from dtrain.models.nn.context import Context
from dtrain.models.nn.delta_rule import gated_delta_rule, short_convolution
from dtrain.models.nn.kv_cache import Kept, KeptLayer
from dtrain.models.nn.layers import added, bias, lift, scale
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.param import Init, Param, Tree, uniform
from dtrain.models.nn.remat import ATTENTION

CONVOLVED = ("value", "key", "query")
"""x, B and C of the paper: what the state is added, by which key, and by which query it is read."""


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Each head has a state of `state` x `head_dim` values, which decays and to which each token of a row adds."""

    heads: Positive
    """Heads of the values."""
    head_dim: Positive
    """Values per head."""
    state: Positive
    """Values of the state for each value of a head: those of a key and of a query."""
    groups: Positive = 1
    """Groups of heads, of which each has one key and one query."""
    taps: Positive = 4
    """Tokens that the convolution of values, keys and queries reads, its own included."""

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise FieldError("groups", f"groups = {self.groups} does not divide heads = {self.heads}")

    def products(self, width: int) -> int:
        """Multiplications for each token, beside those with matrices: the state is added to and read."""
        del width
        return 2 * self.heads * self.state * self.head_dim

    @property
    def _groups(self) -> tuple[str, str]:
        """The dim of groups in parameters, and in `Context.shard`: one group is that of all heads, on every device."""
        return ("kv_heads", "kv_heads") if self.groups > 1 else ("_", "")

    def params(self, width: int, inner: Init, outer: Init) -> Tree:
        """Matrices from the activations, taps and biases, decay and skip of each head, the scale, the matrix back."""
        of_groups, _ = self._groups
        values, keys = (self.heads, self.head_dim), (self.groups, self.state)
        of_values = Param((width, *values), "embed heads _", inner, fan_in=("embed",))
        of_keys = Param((width, *keys), f"embed {of_groups} _", inner, fan_in=("embed",))
        tree: Tree = {"gate": of_values, "value": of_values, "key": of_keys, "query": of_keys}
        tree["decay"] = Param((width, self.heads), "embed heads", inner, fan_in=("embed",))
        for name, shape, head in zip(CONVOLVED, (values, keys, keys), ("heads", of_groups, of_groups), strict=True):
            tree[f"{name}_taps"] = Param((*shape, self.taps), f"{head} _ _", uniform(self.taps**-0.5), decay=False)
            tree[f"{name}_bias"] = bias(shape, f"{head} _")
        tree["rate"] = Param((self.heads,), "heads", initial_rate, decay=False, exact=True)
        tree["shift"] = Param((self.heads,), "heads", initial_shift, decay=False, exact=True)
        tree |= {"skip": scale((self.heads,), "heads"), "scale": scale(values, "heads _")}
        tree["out"] = Param((*values, width), "heads _ embed", outer, fan_in=("heads", "_"))
        return tree

    def apply(
        self, own: Tree, y_BTE: jax.Array, document_BT: jax.Array | None, epsilon: float, ctx: Context
    ) -> jax.Array:
        """(B, T, E), summed over this device's share of the heads only."""
        _, of_groups = self._groups

        def project(name: str, head: str) -> jax.Array:
            return ctx.shard(matmul(y_BTE, own[name], name=name), "batch", "length", head or None, None)

        def convolved(name: str, head: str) -> jax.Array:
            x_BTHV = ctx.preceding(project(name, head), self.taps - 1, name)
            x_BTHV = short_convolution(x_BTHV.astype(jnp.float32), own[f"{name}_taps"], document_BT)
            return jax.nn.silu(added(x_BTHV, own[f"{name}_bias"].astype(jnp.float32)))

        v_BTHV, k_BTGK, q_BTGK = (convolved(name, "heads" if name == "value" else of_groups) for name in CONVOLVED)
        heads, groups = v_BTHV.shape[2], k_BTGK.shape[2]
        if groups > 1 and heads // groups != self.heads // self.groups:
            message = "mesh.rules: a device has the keys of all groups of a Mamba layer, and some of the heads"
            raise RecipeError(message, "give kv_heads and heads the same rule")
        # float32 throughout: the decays of many tokens are multiplied
        rate_H, shift_H, skip_H = (own[name].astype(jnp.float32) for name in ("rate", "shift", "skip"))
        step_BTH = matmul(y_BTE, own["decay"], dtype="float32", narrow=False)
        step_BTH = jax.nn.softplus(added(ctx.shard(step_BTH, "batch", "length", "heads"), shift_H))
        step_BTH = ctx.of_tokens(step_BTH)  # a step of zero changes no state
        decay_BTH = -lift(jnp.exp(rate_H), step_BTH) * step_BTH
        state_BGRKV = jnp.zeros((len(y_BTE), groups, heads // groups, self.state, self.head_dim), jnp.float32)

        def by_group(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])

        def rule(state_BGRKV: jax.Array) -> tuple[jax.Array, jax.Array]:
            stepped_BTGRV, decay_BTGR = by_group(v_BTHV * step_BTH[..., None]), by_group(decay_BTH)
            return gated_delta_rule(q_BTGK, k_BTGK, stepped_BTGRV, decay_BTGR, None, state_BGRKV, document_BT)

        out_BTHV = ctx.recurrent(rule, state_BGRKV).reshape(v_BTHV.shape)
        out_BTHV = (out_BTHV + lift(skip_H[:, None], v_BTHV) * v_BTHV).astype(y_BTE.dtype)
        out_BTHV = checkpoint_name(out_BTHV, ATTENTION).astype(jnp.float32)
        out_BTHV = out_BTHV * jax.nn.silu(project("gate", "heads").astype(jnp.float32))
        out_BTHV = self._normalised(own["scale"], out_BTHV, groups, epsilon, ctx).astype(y_BTE.dtype)
        return matmul(out_BTHV, own["out"], contract_dims=2, name="out")

    def _normalised(
        self, scale_HV: jax.Array, x_BTHV: jax.Array, groups: int, epsilon: float, ctx: Context
    ) -> jax.Array:
        """RMS normalisation over all values of a group, of which this device may have a share if there is one group."""
        squares_BTG = jnp.square(x_BTHV).sum(-1).reshape(*x_BTHV.shape[:2], groups, -1).sum(-1)
        squares_BTG = squares_BTG if self.groups > 1 else ctx.reduce(squares_BTG, "heads")
        factor_BTG = jax.lax.rsqrt(squares_BTG * (self.groups / (self.heads * self.head_dim)) + epsilon)
        factor_BTH1 = jnp.repeat(factor_BTG, x_BTHV.shape[2] // groups, axis=2)[..., None]
        return x_BTHV * factor_BTH1 * lift(scale_HV.astype(jnp.float32), x_BTHV)

    def kept(self, width: int, rows: int) -> KeptLayer:
        """The last tokens of the convolutions, and the state of each head."""
        del width
        of_groups = self._groups[1] or None
        values, keys = ("heads", (self.heads, self.head_dim)), (of_groups, (self.groups, self.state))
        tokens = {
            name: Kept((rows, self.taps - 1, *shape), (None, None, head, None))
            for name, (head, shape) in zip(CONVOLVED, (values, keys, keys), strict=True)
        }
        state = (rows, self.groups, self.heads // self.groups, self.state, self.head_dim)
        dims = (None, of_groups, None if of_groups else "heads", None, None)
        return tokens, Kept(state, dims, "float32")
