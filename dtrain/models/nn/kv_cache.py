"""The context for generation: keys and values of earlier tokens are cached and not recomputed.

Dims: B rows, T new tokens, C capacity of the cache in tokens, G key-value heads, R query heads per group,
D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.models.nn.attention import MASKED_SCORE, AttentionSpec, in_chunks
from dtrain.models.nn.context import LATER, Block, Layers
from dtrain.models.nn.param import Tree
from dtrain.models.nn.single_device import SingleDeviceContext


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "used", "pad_B"], meta_fields=[])
@dataclass(frozen=True)
class KVCache:
    """Keys (B, G, D, C) and values (B, G, C, D) of the tokens so far, one array for each layer, changed in place. A
    layer without attention has its last tokens {name: (B, count, ...)} and its state, or None, in their places.

    All rows fill the same number of slots, `used`, int32 (). Shorter ones begin with `pad_B` empty slots, int32 (B,):
    slot c has the token at position c - pad.
    """

    k: tuple[Any, ...]
    v: tuple[Any, ...]
    used: jax.Array
    pad_B: jax.Array

    @classmethod
    def empty(cls, layers: Sequence["KeptLayer"], rows: int, dtype: str) -> "KVCache":
        """An empty cache for so many rows."""

        def zeros(kept: Tree) -> Tree:
            return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype or dtype), kept, is_leaf=is_kept)

        k, v = (tuple(zeros(layer[part]) for layer in layers) for part in range(2))
        return cls(k, v, jnp.zeros((), jnp.int32), jnp.zeros(rows, jnp.int32))


@dataclass(frozen=True)
class Kept:
    """An array that generation keeps of a layer: its shape, the name of each dim, its dtype if not that of keys."""

    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    dtype: str = ""


KeptLayer = tuple[Tree, Tree]
"""What is kept of a layer, each `Kept`: keys and values; or, of other mixers, tokens by name, and a state or None; or
({}, None), of one that attends to the keys of an earlier layer."""


def is_kept(x: object) -> bool:
    """Whether this leaf declares an array of the cache."""
    return isinstance(x, Kept)


@dataclass(frozen=True)
class CachedContext(SingleDeviceContext):
    """The verbs for tokens that follow those in the cache. `stack` appends the extended cache to `grown`."""

    cache: KVCache | None = None
    """Inside `stack` that of one layer."""
    grown: list[KVCache] = field(default_factory=list)
    k: dict[str, Any] = field(default_factory=dict)
    v: list[Any] = field(default_factory=list)
    """Of one layer what is kept for the tokens that follow: keys, under "", or tokens by name; values or the state."""

    @property
    def _cache(self) -> KVCache:
        assert self.cache is not None
        return self.cache

    @property
    def keeps_keys(self) -> bool:
        return True

    def positions(self, length: int) -> jax.Array:
        """The positions of `length` new tokens of each row, as the model's feature POSITION: (B, T); 0 for padding."""
        slot_1T = self._cache.used + jnp.arange(length, dtype=jnp.int32)[None]
        return jnp.maximum(slot_1T - self._cache.pad_B[:, None], 0)

    def places(self, length: int) -> jax.Array:
        """Not known here: rows may have different positions. The batch must have POSITION, as `positions` gives it."""
        raise NotImplementedError("give the model the feature POSITION")

    def attend(
        self,
        q_BTHD: jax.Array,
        k_BTGD: jax.Array,
        v_BTGD: jax.Array,
        spec: AttentionSpec,
        document_BT: jax.Array | None,
        sink_H: jax.Array | None = None,
    ) -> jax.Array:
        """Attention inside a layer, to the cached tokens and the new ones.

        New keys and values are written from slot `used` on. The unused rest of the cache needs no mask of its own: its
        positions are after every query, and attention is causal. A layer that keeps nothing attends to what
        `for_later` of an earlier one gave.
        """
        cache = self._cache
        if spec.values_in_keys:
            v_BTGD = v_BTGD[..., :0]
        k_BGDC, v_BGCD = (k_BTGD, v_BTGD) if cache.v[0] is None else self._extended(k_BTGD, v_BTGD)

        def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            values = jnp.swapaxes(k_BGDC[:, :, : spec.values_in_keys], 2, 3) if spec.values_in_keys else v_BGCD
            return _attention(part[0], k_BGDC, values, spec, part[1], cache.pad_B, sink_H).astype(q_BTHD.dtype)

        return in_chunks(chunk, (q_BTHD, self.positions(q_BTHD.shape[1])), q_BTHD.shape[1])

    def _extended(self, k_BTGD: jax.Array, v_BTGD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The cache of this layer, with new keys and values."""
        cache = self._cache
        k_BGDT, v_BGTD = k_BTGD.transpose(0, 2, 3, 1), v_BTGD.transpose(0, 2, 1, 3)
        k_BGDC = jax.lax.dynamic_update_slice(cache.k[0], k_BGDT.astype(cache.k[0].dtype), (0, 0, 0, cache.used))
        v_BGCD = jax.lax.dynamic_update_slice(cache.v[0], v_BGTD.astype(cache.v[0].dtype), (0, 0, cache.used, 0))
        self.k[""] = k_BGDC
        self.v.append(v_BGCD)
        return k_BGDC, v_BGCD

    def for_later(self, k_BTGD: jax.Array, v_BTGD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.k[""], self.v[0]

    def of_tokens(self, x: jax.Array) -> jax.Array:
        slot_T = self._cache.used + jnp.arange(x.shape[1], dtype=jnp.int32)
        real_BT = slot_T[None] >= self._cache.pad_B[:, None]
        return jnp.where(real_BT.reshape(*real_BT.shape, *[1] * (x.ndim - 2)), x, 0)

    def preceding(self, x: jax.Array, count: int, name: str) -> jax.Array:
        """Of the empty slots at the beginning of shorter rows, x is zero."""
        x = jnp.concatenate([self._cache.k[0][name].astype(x.dtype), self.of_tokens(x)], 1)
        self.k[name] = x[:, x.shape[1] - count :].astype(self._cache.k[0][name].dtype)
        return x

    def recurrent(self, step: Callable[[jax.Array], tuple[jax.Array, jax.Array]], state: jax.Array) -> jax.Array:
        out, state = step(self._cache.v[0])
        self.v.append(state)
        return out

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        """`params`: the layers' parameters, stacked, or apart as `unstacked` gives them, which saves copies."""
        cache = self._cache
        layers = params if isinstance(params, tuple) else unstacked(params, how.groups)
        inside = []
        for number, layer in enumerate(layers):
            own = replace(cache, k=(cache.k[number],), v=(cache.v[number],))
            inside.append(replace(self, cache=own, grown=[], k={}, v=[]))
            layer = layer | how.rows(layer, shared, self, stacked=False) if how.tables else layer
            x, sums = blocks[number % len(blocks)](layer, x, shared, inside[-1])
            shared = (shared or {}) | sums.pop(LATER, {})
        k, v = (tuple(ctx.k.get("", ctx.k) for ctx in inside), tuple(ctx.v[0] if ctx.v else None for ctx in inside))
        self.grown.append(replace(cache, k=k, v=v, used=cache.used + x.shape[1]))
        return x, {}


def unstacked(params: Tree, groups: Sequence[str] = ()) -> tuple[Tree, ...]:
    """The parameters of each layer, from parameters that are stacked along their first dim, in `groups` as `Layers`
    has them."""
    stacks = {name: _apart(stack) for name, stack in (params if groups else {"": params}).items()}
    total, order = sum(map(len, stacks.values())), cycle(groups or [""])
    return tuple(stacks[name].pop(0) for name in islice(order, total))


def _apart(stack: Tree) -> list[Tree]:
    return [jax.tree.map(lambda p, i=i: p[i], stack) for i in range(jax.tree.leaves(stack)[0].shape[0])]


def _attention(
    q_BTHD: jax.Array,
    k_BGDC: jax.Array,
    v_BGCD: jax.Array,
    spec: AttentionSpec,
    position_BT: jax.Array,
    pad_B: jax.Array,
    sink_H: jax.Array | None,
) -> jax.Array:
    """Causal attention of queries at these positions to the keys of all slots: (B, T, H, D) in float32."""
    q_BGRTD = jnp.moveaxis(q_BTHD.reshape(*q_BTHD.shape[:2], v_BGCD.shape[1], -1, q_BTHD.shape[3]), 1, 3)
    s = jnp.einsum("BGRTD,BGDC->BGRTC", q_BGRTD, k_BGDC, preferred_element_type=jnp.float32) * spec.scale
    s = spec.softcap * jnp.tanh(s / spec.softcap) if spec.softcap else s
    key_BC = jnp.arange(v_BGCD.shape[2], dtype=jnp.int32)[None] - pad_B[:, None]
    back_BTC = position_BT[:, :, None] - key_BC[:, None]
    mask_BTC = (back_BTC >= 0) & (key_BC >= 0)[:, None]
    mask_BTC = mask_BTC & (back_BTC < spec.window) if spec.window is not None else mask_BTC
    if spec.chunk is not None:
        mask_BTC = mask_BTC & (position_BT[:, :, None] // spec.chunk == key_BC[:, None] // spec.chunk)
    s = jnp.where(mask_BTC[:, None, None], s, MASKED_SCORE)
    if sink_H is None:
        p = jax.nn.softmax(s, axis=-1)
    else:
        sink_GR11 = sink_H.astype(jnp.float32).reshape(1, s.shape[1], -1, 1, 1)
        p = jnp.exp(s - jnp.logaddexp(jax.nn.logsumexp(s, -1, keepdims=True), sink_GR11))
    out_BGRTD = jnp.einsum("BGRTC,BGCD->BGRTD", p.astype(v_BGCD.dtype), v_BGCD, preferred_element_type=jnp.float32)
    return jnp.moveaxis(out_BGRTD, 3, 1).reshape(*q_BTHD.shape[:3], -1)
