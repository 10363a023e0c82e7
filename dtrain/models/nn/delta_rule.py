"""The gated delta rule, a linear attention with a state of fixed size, and the short convolution before it.

A head has a state S of shape (K, V). With the decay g <= 0, the strength b, the key k, the value v and the query q of a
token (Yang et al. 2024, "Gated Delta Networks", equation 10):

    S <- exp(g) S;   S <- S + k (b (v - S^T k))^T;   y = S^T q

Without a strength, the state is added to whatever it holds, as in a state-space layer (Dao and Gu 2024, section 6):

    S <- exp(g) S + k v^T;   y = S^T q

Rows are computed in chunks: inside a chunk by matrix products, from chunk to chunk by the state. Document boundaries
set the state to zero.

Dims: B batch, T tokens, G heads of queries and keys, R heads of values for each of those, K and V their values,
N chunks, C (and J) tokens of a chunk, W taps of the convolution.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.models.nn.vma import axes_of, vary

CHUNK = 64
"""Most tokens in a chunk; a power of two."""


def short_convolution(x_BTX: jax.Array, taps_XW: jax.Array, document_BT: jax.Array | None) -> jax.Array:
    """A causal convolution of each value of x (B, W - 1 + T, ...) over the tokens: (B, T, ...).

    The first W - 1 tokens of x are those before the row. `document_BT`: tokens of other documents are left out.
    """
    before = taps_XW.shape[-1] - 1
    length = x_BTX.shape[1] - before
    total: jax.Array | float = 0.0
    for tap in range(before + 1):
        part = x_BTX[:, tap : tap + length].astype(jnp.float32)
        part = part * taps_XW[..., tap].astype(jnp.float32).reshape(1, 1, *taps_XW.shape[:-1])
        if document_BT is not None and tap < before:
            back = before - tap  # how many tokens earlier
            earlier_BT = jnp.pad(document_BT, ((0, 0), (back, 0)), mode="edge")[:, :length]
            same_BT = earlier_BT == document_BT
            part = jnp.where(same_BT.reshape(*same_BT.shape, *[1] * (part.ndim - 2)), part, 0)
        total += part
    return jnp.asarray(total).astype(x_BTX.dtype)


def gated_delta_rule(
    q_BTGK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGRV: jax.Array,
    decay_BTGR: jax.Array,
    strength_BTGR: jax.Array | None,
    state_BGRKV: jax.Array,
    document_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """y (B, T, G, R, V) and the state after the last token, both float32. Queries and keys are taken as they are."""
    length = q_BTGK.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())
    chunks = -(-length // size)

    fill = ((0, 0), (0, chunks * size - length))

    def apart(x_BTX: jax.Array) -> jax.Array:
        """(B, T, ...) → (N, B, C, ...); the tokens that fill the last chunk are zeros, which change no state."""
        x_BTX = jnp.pad(x_BTX.astype(jnp.float32), (*fill, *[(0, 0)] * (x_BTX.ndim - 2)))
        return jnp.moveaxis(x_BTX.reshape(x_BTX.shape[0], chunks, size, *x_BTX.shape[2:]), 1, 0)

    q_NBGCK, k_NBGCK = (jnp.moveaxis(apart(x), 2, 3) for x in (q_BTGK, k_BTGK))
    v_NBGRCV, decay_NBGRC = (jnp.moveaxis(apart(x), 2, 4) for x in (v_BTGRV, decay_BTGR))
    lower = jnp.tril(jnp.ones((1, 1, 1, 1, size, size), bool))
    if document_BT is None:
        same, sum_NBGRC = lower, jnp.cumsum(decay_NBGRC, -1)
        enters = continues = jnp.ones((), jnp.float32)
        leaves = jnp.ones((1, 1, 1, 1, 1), bool)
    else:
        document_NBC = jnp.moveaxis(jnp.pad(document_BT, fill, mode="edge").reshape(-1, chunks, size), 1, 0)
        last_NB1 = document_NBC[..., -1:]
        # the state that enters the first chunk belongs to its first document
        before_NB1 = jnp.concatenate([document_NBC[:1, :, :1], last_NB1[:-1]])
        same = lower & (document_NBC[..., :, None] == document_NBC[..., None, :])[:, :, None, None]
        # a sum over a document alone: what others add to both terms of a difference would leave its rounding
        own = jnp.where(same, decay_NBGRC[..., None, :], 0)
        sum_NBGRC = own.sum(-1)
        enters = (document_NBC == before_NB1).astype(jnp.float32)[:, :, None, None]
        leaves = (document_NBC == last_NB1)[:, :, None, None]
        continues = (last_NB1 == before_NB1).astype(jnp.float32)[..., None, None, None]
    # decay from token j to token c of a chunk: exp of a sum that is positive, and could overflow, for later j only
    between_NBGRCJ = jnp.where(same, sum_NBGRC[..., :, None] - sum_NBGRC[..., None, :], -jnp.inf)
    between_NBGRCJ = jnp.exp(between_NBGRCJ)
    enter_NBGRC = jnp.exp(sum_NBGRC) * enters
    # masked before exp, too: the sum of an earlier document's token may be far below that of the last token
    leave_NBGRC = jnp.exp(jnp.where(leaves, sum_NBGRC[..., -1:] - sum_NBGRC, -jnp.inf))
    whole_NBGR11 = jnp.exp(sum_NBGRC[..., -1:])[..., None] * continues
    added_NBGRCV, read_NBGRCK = v_NBGRCV, None
    if strength_BTGR is not None:
        # the values that each token adds to the state depend on those before it in the chunk: a triangular system
        strength_NBGRC = jnp.moveaxis(apart(strength_BTGR), 2, 4)
        keys_NBGCJ = jnp.einsum("NBGCK,NBGJK->NBGCJ", k_NBGCK, k_NBGCK)
        system_NBGRCJ = strength_NBGRC[..., None] * keys_NBGCJ[:, :, :, None] * between_NBGRCJ
        solved_NBGRCJ = unit_lower_inverse(jnp.tril(system_NBGRCJ, -1))
        added_NBGRCV = solved_NBGRCJ @ (strength_NBGRC[..., None] * v_NBGRCV)
        read_NBGRCK = solved_NBGRCJ @ ((strength_NBGRC * enter_NBGRC)[..., None] * k_NBGCK[:, :, :, None])
    scores_NBGRCJ = jnp.einsum("NBGCK,NBGJK->NBGCJ", q_NBGCK, k_NBGCK)[:, :, :, None] * between_NBGRCJ

    def chunk(state_BGRKV: jax.Array, part: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        q_BGCK, k_BGCK, added_BGRCV, read_BGRCK, scores_BGRCJ, enter_BGRC, leave_BGRC, whole_BGR11 = part
        new_BGRCV = added_BGRCV if read_BGRCK is None else added_BGRCV - read_BGRCK @ state_BGRKV
        y_BGRCV = enter_BGRC[..., None] * (q_BGCK[:, :, None] @ state_BGRKV) + scores_BGRCJ @ new_BGRCV
        left_BGRKC = jnp.swapaxes(k_BGCK[:, :, None] * leave_BGRC[..., None], -1, -2)
        return state_BGRKV * whole_BGR11 + left_BGRKC @ new_BGRCV, y_BGRCV

    parts = (
        q_NBGCK, k_NBGCK, added_NBGRCV, read_NBGRCK, scores_NBGRCJ, enter_NBGRC, leave_NBGRC, whole_NBGR11
    )  # fmt: skip
    state_BGRKV = vary(state_BGRKV, axes_of(added_NBGRCV))
    state_BGRKV, y_NBGRCV = jax.lax.scan(chunk, state_BGRKV, parts)
    y_BNCGRV = y_NBGRCV.transpose(1, 0, 4, 2, 3, 5)
    return y_BNCGRV.reshape(y_BNCGRV.shape[0], chunks * size, *y_BNCGRV.shape[3:])[:, :length], state_BGRKV


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """The inverse (..., C, C) of I + lower, where `lower` is strictly lower triangular and C a power of two.

    By blocks of 1, 2, 4 ...: [[A, 0], [M, B]]^-1 = [[A^-1, 0], [-B^-1 M A^-1, B^-1]]. That is as exact as forward
    substitution, and made of matrix products alone.
    """
    size = lower.shape[-1]
    found = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)  # (..., blocks, rows, columns)
    for rows in (2**level for level in range(int(math.log2(size)))):
        count = size // (2 * rows)
        blocks = lower.reshape(*lower.shape[:-2], count, 2 * rows, count, 2 * rows)
        own = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., rows:, :rows]
        pairs = found.reshape(*found.shape[:-3], count, 2, rows, rows)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        high = jax.lax.Precision.HIGHEST
        below = -jnp.matmul(jnp.matmul(second, own, precision=high), first, precision=high)
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        found = jnp.concatenate([top, jnp.concatenate([below, second], -1)], -2)
    return found[..., 0, :, :]


def _inverse(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _gradient(inverse: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    """d(L^-1) = -L^-1 dL L^-1."""
    turned, high = jnp.swapaxes(inverse, -1, -2), jax.lax.Precision.HIGHEST
    return (-jnp.matmul(jnp.matmul(turned, g, precision=high), turned, precision=high),)


unit_lower_inverse.defvjp(_inverse, _gradient)
