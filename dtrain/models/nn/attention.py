"""Softmax attention in plain JAX: masks, scores, and attention in chunks of queries, in bounded memory.

Dims: B batch, T queries, S keys, H query heads, G key-value heads, R query heads per group, D head dim; values may have
another number of them than queries and keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.models.nn.vma import axes_of, vary

MASKED_SCORE = -1e30
"""Score of a masked key: its exponential is 0 in float32. -inf would give NaN for a query without any key."""

CHUNK = 1024
"""Most queries whose scores are in memory at once, if the row's length has a divisor from LEAST to CHUNK."""
LEAST = 128


@dataclass(frozen=True)
class AttentionSpec:
    """Which keys a query attends to, and how scores are computed."""

    scale: float
    causal: bool = True
    window: int | None = None
    """Keys that a query attends to, its own included: those at distances 0 to window - 1."""
    softcap: float | None = None
    """Bound of the scores: softcap x tanh(scores / softcap) (Gemma 2)."""
    values_in_keys: int | None = None
    """In generation: the values are the first so many numbers of each key (latent attention)."""
    chunk: int | None = None
    """In generation: keys that a query attends to are those of its chunk of so many positions (Llama 4). Elsewhere each
    chunk has a document number of its own."""


@dataclass(frozen=True)
class Positions:
    """Positions of queries or keys in the row (T,) and, in packed rows, their document numbers (B, T)."""

    at_T: jax.Array
    document_BT: jax.Array | None = None


jax.tree_util.register_dataclass(Positions, ["at_T", "document_BT"], [])


def attention_mask(spec: AttentionSpec, queries: Positions, keys: Positions) -> jax.Array | None:
    """Whether each query attends to each key: (1 or B, T, S); None if every query attends to all."""
    back_TS = queries.at_T[:, None] - keys.at_T[None, :]
    mask = back_TS >= 0 if spec.causal else None
    if spec.window is not None:
        near = back_TS < spec.window if spec.causal else jnp.abs(back_TS) < spec.window
        mask = near if mask is None else mask & near
    mask = None if mask is None else mask[None]
    if queries.document_BT is not None and keys.document_BT is not None:
        same = queries.document_BT[:, :, None] == keys.document_BT[:, None, :]
        mask = same if mask is None else mask & same
    return mask


def attention_scores(q_BTHD: jax.Array, k_BSGD: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Scaled and soft-capped scores in float32: (B, G, R, T, S)."""
    q_BTGRD = q_BTHD.reshape(*q_BTHD.shape[:2], k_BSGD.shape[2], -1, q_BTHD.shape[3])
    q_BGRTD, k_BGSD = jnp.moveaxis(q_BTGRD, 1, 3), jnp.moveaxis(k_BSGD, 1, 2)
    s = _scores(vary(q_BGRTD, axes_of(k_BGSD)), vary(k_BGSD, axes_of(q_BGRTD))) * spec.scale
    return spec.softcap * jnp.tanh(s / spec.softcap) if spec.softcap else s


@jax.custom_vjp
def _scores(q_BGRTD: jax.Array, k_BGSD: jax.Array) -> jax.Array:
    """Products of queries and keys, in float32: (B, G, R, T, S).

    The gradients here and in `_mixed` are products in which the larger operand keeps its order of dims: by autodiff,
    XLA:CPU transposes arrays of the size of the scores.
    """
    return jnp.einsum("BGRTD,BGSD->BGRTS", q_BGRTD, k_BGSD, preferred_element_type=jnp.float32)


def _scores_backward(saved: tuple[jax.Array, jax.Array], ds_BGRTS: jax.Array) -> tuple[jax.Array, jax.Array]:
    q_BGRTD, k_BGSD = saved
    of_q = jnp.einsum("BGRTS,BGSD->BGRTD", ds_BGRTS, k_BGSD, preferred_element_type=jnp.float32)
    of_k = jnp.einsum("BGRTD,BGRTS->BGDS", q_BGRTD, ds_BGRTS, preferred_element_type=jnp.float32)
    return of_q.astype(q_BGRTD.dtype), jnp.swapaxes(of_k, 2, 3).astype(k_BGSD.dtype)


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)


@jax.custom_vjp
def _mixed(p_BGRTS: jax.Array, v_BGSD: jax.Array) -> jax.Array:
    """Values weighted by probabilities, in float32: (B, T, G, R, D)."""
    return jnp.einsum("BGRTS,BGSD->BTGRD", p_BGRTS, v_BGSD, preferred_element_type=jnp.float32)


def _mixed_backward(saved: tuple[jax.Array, jax.Array], do_BTGRD: jax.Array) -> tuple[jax.Array, jax.Array]:
    p_BGRTS, v_BGSD = saved
    do_BGRTD = jnp.moveaxis(do_BTGRD, 1, 3)
    of_p = jnp.einsum("BGRTD,BGSD->BGRTS", do_BGRTD, v_BGSD, preferred_element_type=jnp.float32)
    of_v = jnp.einsum("BGRTD,BGRTS->BGDS", do_BGRTD, p_BGRTS, preferred_element_type=jnp.float32)
    return of_p.astype(p_BGRTS.dtype), jnp.swapaxes(of_v, 2, 3).astype(v_BGSD.dtype)


_mixed.defvjp(lambda p, v: (_mixed(p, v), (p, v)), _mixed_backward)


def attention_with_lse(
    q_BTHD: jax.Array,
    k_BSGD: jax.Array,
    v_BSGD: jax.Array,
    spec: AttentionSpec,
    queries: Positions,
    keys: Positions,
    *,
    own: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention to these keys only: values (B, T, H, D) and log-sum-exp of the scores (B, T, H), both float32.

    The log-sum-exp lets results over several sets of keys be merged (Dao et al. 2022, section 3.1). A query without
    any key has zero values and a log-sum-exp of MASKED_SCORE. `own`: every query attends at least to its own key.
    """
    s, mask = attention_scores(q_BTHD, k_BSGD, spec), attention_mask(spec, queries, keys)
    mask = None if mask is None else mask[:, None, None]
    s = s if mask is None else jnp.where(mask, s, MASKED_SCORE)
    top = jax.lax.stop_gradient(s.max(-1, keepdims=True))  # softmax does not change when a constant is subtracted
    p = jnp.exp(s - top)
    p = p if mask is None or own else jnp.where(mask, p, 0.0)  # if all keys are masked, every exponential is 1
    total = p.sum(-1)
    v_BGSD = jnp.moveaxis(v_BSGD, 1, 2)
    out = _mixed(vary(p.astype(v_BGSD.dtype), axes_of(v_BGSD)), vary(v_BGSD, axes_of(p)))
    total_BTGR = jnp.moveaxis(total, 3, 1)
    out = out / jnp.maximum(total_BTGR, 1e-30)[..., None]
    log = jnp.where(
        total_BTGR > 0, jnp.log(jnp.maximum(total_BTGR, 1e-30)) + jnp.moveaxis(top[..., 0], 3, 1), MASKED_SCORE
    )
    return out.reshape(*q_BTHD.shape[:3], -1), log.reshape(q_BTHD.shape[:3])


def with_sink(out_BTHD: jax.Array, log_BTH: jax.Array, sink_H: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention to the same keys and to one more for each head, of this score and of value zero (gpt-oss).

    Takes and returns the values and the log-sum-exp of the scores, both float32.
    """
    log = jnp.logaddexp(log_BTH, sink_H.astype(jnp.float32)[None, None])
    return out_BTHD * jnp.exp(log_BTH - log)[..., None], log


def in_chunks(attend: Callable[..., object], queries: object, length: int) -> Any:
    """Apply `attend` to at most CHUNK queries at a time; its intermediates are recomputed in the backward pass.

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
    q_BTHD: jax.Array,
    k_BSGD: jax.Array,
    v_BSGD: jax.Array,
    spec: AttentionSpec,
    positions: Positions,
    sink_H: jax.Array | None = None,
) -> jax.Array:
    """Attention over full rows, in the dtype of the queries: (B, T, H, D). `sink_H`: see `with_sink`."""

    def chunk(part: tuple[jax.Array, Positions]) -> jax.Array:
        found = attention_with_lse(part[0], k_BSGD, v_BSGD, spec=spec, queries=part[1], keys=positions, own=True)
        return (found if sink_H is None else with_sink(*found, sink_H))[0].astype(q_BTHD.dtype)

    return in_chunks(chunk, (q_BTHD, positions), q_BTHD.shape[1])


def mean_attended_keys(length: int, window: int | None, chunk: int | None = None) -> float:
    """Mean number of keys that a query of a row attends to, under a causal mask."""
    if chunk is not None:  # the n-th query of a chunk has n keys
        whole, rest = divmod(length, chunk)
        return (whole * chunk * (chunk + 1) + rest * (rest + 1)) / (2 * length)
    # of `length` queries the first near - 1 have fewer than `near` keys: near (near - 1) / 2 missing in all
    near = min(window or length, length)
    return near - near * (near - 1) / (2 * length)
