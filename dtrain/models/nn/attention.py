"""Softmax attention in plain JAX: which keys a query sees, block by block, in bounded memory.

Dims: B batch, T queries, S keys, H query heads, G key-value heads, R query heads to a group, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

HIDDEN = -1e30
"""A score that no exponential survives; infinity would make NaN of a query that sees nothing."""

CHUNK = 1024
"""Queries whose scores are in memory at once, where the row's length has a divisor from LEAST to this."""
LEAST = 128


@dataclass(frozen=True)
class AttentionSpec:
    """Which keys a query sees, and how scores are formed."""

    scale: float
    causal: bool = True
    window: int | None = None
    """A query sees itself and this many keys less one before it."""
    softcap: float | None = None
    """Scores are bent to lie within this (Gemma 2)."""


@dataclass(frozen=True)
class Positions:
    """Queries or keys: their place in the row (T,), and where rows are packed their document (B, T)."""

    at_T: jax.Array
    document_BT: jax.Array | None = None


jax.tree_util.register_dataclass(Positions, ["at_T", "document_BT"], [])


def attention_mask(reach: AttentionSpec, queries: Positions, keys: Positions) -> jax.Array | None:
    """Whether each query sees each key: (1 or B, T, S); None where every query sees all."""
    back_TS = queries.at_T[:, None] - keys.at_T[None, :]
    seen = back_TS >= 0 if reach.causal else None
    if reach.window is not None:
        near = back_TS < reach.window if reach.causal else jnp.abs(back_TS) < reach.window
        seen = near if seen is None else seen & near
    seen = None if seen is None else seen[None]
    if queries.document_BT is not None and keys.document_BT is not None:
        same = queries.document_BT[:, :, None] == keys.document_BT[:, None, :]
        seen = same if seen is None else seen & same
    return seen


def attention_scores(q_BTHD: jax.Array, k_BSGD: jax.Array, reach: AttentionSpec) -> jax.Array:
    """Scaled products in float32: (B, G, R, T, S)."""
    q_BTGRD = q_BTHD.reshape(*q_BTHD.shape[:2], k_BSGD.shape[2], -1, q_BTHD.shape[3])
    s = jnp.einsum("BTGRD,BSGD->BGRTS", q_BTGRD, k_BSGD, preferred_element_type=jnp.float32) * reach.scale
    return reach.softcap * jnp.tanh(s / reach.softcap) if reach.softcap else s


def attention_with_lse(
    q_BTHD: jax.Array, k_BSGD: jax.Array, v_BSGD: jax.Array, reach: AttentionSpec, queries: Positions, keys: Positions
) -> tuple[jax.Array, jax.Array]:
    """Attention over these keys alone: values (B, T, H, D) and log of the summed weights (B, T, H)."""
    s, seen = attention_scores(q_BTHD, k_BSGD, reach), attention_mask(reach, queries, keys)
    seen = None if seen is None else seen[:, None, None]
    s = s if seen is None else jnp.where(seen, s, HIDDEN)
    top = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    p = jnp.exp(s - top)
    p = p if seen is None else jnp.where(seen, p, 0.0)
    total = p.sum(-1)
    out = jnp.einsum("BGRTS,BSGD->BTGRD", p.astype(v_BSGD.dtype), v_BSGD, preferred_element_type=jnp.float32)
    total_BTGR = jnp.moveaxis(total, 3, 1)
    out = out / jnp.maximum(total_BTGR, 1e-30)[..., None]
    log = jnp.where(total_BTGR > 0, jnp.log(jnp.maximum(total_BTGR, 1e-30)) + jnp.moveaxis(top[..., 0], 3, 1), HIDDEN)
    return out.reshape(q_BTHD.shape), log.reshape(q_BTHD.shape[:3])


def in_chunks(attend: Callable[..., Any], queries: Any, length: int) -> Any:
    """`attend` on at most CHUNK queries at a time, its inside computed again in the backward pass.

    `queries` and the results are trees of arrays (B, T, ...) or (T,).
    """
    sizes = [size for size in range(min(LEAST, CHUNK), min(CHUNK, length) + 1) if length % size == 0]
    size = sizes[-1] if sizes and length > CHUNK else length
    parts = length // size
    if parts == 1:
        return attend(queries)

    def split(x: jax.Array) -> jax.Array:
        axis = 0 if x.ndim == 1 else 1
        return jnp.moveaxis(x.reshape(*x.shape[:axis], parts, size, *x.shape[axis + 1 :]), axis, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], length, *x.shape[3:])

    return jax.tree.map(join, jax.lax.map(jax.checkpoint(attend), jax.tree.map(split, queries)))


def attention(
    q_BTHD: jax.Array, k_BSGD: jax.Array, v_BSGD: jax.Array, reach: AttentionSpec, side: Positions
) -> jax.Array:
    """Attention of every query to the keys it sees, in the queries' dtype."""

    def chunk(part: tuple[jax.Array, Positions]) -> jax.Array:
        return attention_with_lse(part[0], k_BSGD, v_BSGD, reach, part[1], side)[0].astype(q_BTHD.dtype)

    return in_chunks(chunk, (q_BTHD, side), q_BTHD.shape[1])


def keys_seen(length: int, window: int | None) -> float:
    """Keys that a query sees under a causal mask, on average over a row."""
    near = min(window or length, length)
    return near - near * (near - 1) / (2 * length)
