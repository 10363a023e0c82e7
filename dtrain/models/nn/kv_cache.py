"""The context for generation: keys and values of earlier tokens are cached and not recomputed.

Dims: L layers, B rows, C capacity of the cache in tokens, G key-value heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from dtrain.models.nn.attention import AttentionSpec, Positions, attention_with_lse
from dtrain.models.nn.context import Block, Layers
from dtrain.models.nn.param import Tree
from dtrain.models.nn.single_device import SingleDeviceContext


@partial(jax.tree_util.register_dataclass, data_fields=["k_LBCGD", "v_LBCGD", "used"], meta_fields=[])
@dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens so far; `used` is their number, int32 ()."""

    k_LBCGD: jax.Array
    v_LBCGD: jax.Array
    used: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int, int], dtype: str) -> "KVCache":
        """An empty cache of that shape (L, B, C, G, D)."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))


@dataclass(frozen=True)
class CachedContext(SingleDeviceContext):
    """The verbs for tokens that follow those in the cache. `stack` appends the extended cache to `grown`."""

    cache: KVCache | None = None
    grown: list[KVCache] = field(default_factory=list)

    @property
    def _cache(self) -> KVCache:
        assert self.cache is not None
        return self.cache

    def places(self, length: int) -> jax.Array:
        return self._cache.used + jnp.arange(length, dtype=jnp.int32)

    def attend(
        self,
        q_BTHD: jax.Array,
        k_BTGD: jax.Array,
        v_BTGD: jax.Array,
        spec: AttentionSpec,
        document_BT: jax.Array | None,
    ) -> jax.Array:
        """Attention inside a layer, where `cache` is that layer's part: (1, B, C, G, D).

        New keys and values are written at `used`. The unused rest of the cache needs no mask of its own: its positions
        are after every query, and attention is causal.
        """
        cache, at = self._cache, (0, self._cache.used, 0, 0)
        k_BCGD = jax.lax.dynamic_update_slice(cache.k_LBCGD[0], k_BTGD.astype(cache.k_LBCGD.dtype), at)
        v_BCGD = jax.lax.dynamic_update_slice(cache.v_LBCGD[0], v_BTGD.astype(cache.v_LBCGD.dtype), at)
        self.grown.append(KVCache(k_BCGD[None], v_BCGD[None], cache.used))
        keys = Positions(jnp.arange(k_BCGD.shape[1], dtype=jnp.int32))
        out, _ = attention_with_lse(
            q_BTHD, k_BCGD, v_BCGD, spec=spec, queries=Positions(self.places(q_BTHD.shape[1])), keys=keys
        )
        return out.astype(q_BTHD.dtype)

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        rounds, cache = len(blocks), self._cache  # one iteration of the scan applies each block once, as in scan_layers

        def split(p: jax.Array) -> jax.Array:
            return p.reshape(p.shape[0] // rounds, rounds, *p.shape[1:])

        def apply_round(carry: jax.Array, layers: Tree) -> tuple[jax.Array, Tree]:
            grown = []
            for i, block in enumerate(blocks):
                layer, k_BCGD, v_BCGD = jax.tree.map(lambda p, i=i: p[i], layers)
                inside = replace(self, cache=KVCache(k_BCGD[None], v_BCGD[None], cache.used), grown=[])
                carry, _ = block(layer, carry, shared, inside)
                grown.append((inside.grown[0].k_LBCGD, inside.grown[0].v_LBCGD))
            return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *grown)

        out, (k, v) = jax.lax.scan(apply_round, x, jax.tree.map(split, (params, cache.k_LBCGD, cache.v_LBCGD)))
        shape = cache.k_LBCGD.shape
        self.grown.append(KVCache(k.reshape(shape), v.reshape(shape), cache.used + x.shape[1]))
        return out, {}
