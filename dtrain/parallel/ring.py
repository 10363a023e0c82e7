"""Ring attention: keys and values go round the devices that share a row (Liu et al. 2023).

Each device holds two chunks of the row, one from its front and one from its back, so that under a
causal mask every device does the same work at every turn (Brandon et al. 2023): its late queries
see the visiting early keys, and of the two other pairs of chunks exactly one counts.

The backward pass goes round again with the gradients of keys and values beside them, so that no
device ever holds more than its own part and one that visits.
Dims: B batch, T the tokens held here, H query heads, G key-value heads, D head dim.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.models.nn.attention import (
    AttentionSpec,
    Positions,
    attention_mask,
    attention_scores,
    attention_with_lse,
    in_chunks,
)
from dtrain.models.nn.param import Tree
from dtrain.models.nn.remat import ATTENTION


class Keys(NamedTuple):
    """Keys and values of one chunk (B, S, G, D), and where they stand."""

    k: jax.Array
    v: jax.Array
    side: Positions


class Queries(NamedTuple):
    """Queries of one chunk (B, T, H, D), and where they stand."""

    q: jax.Array
    side: Positions


class PartialAttention(NamedTuple):
    """Values (B, T, H, D) over some of the keys, and the log of their summed weights (B, T, H)."""

    values: jax.Array
    log: jax.Array


class GradientRequest(NamedTuple):
    """What the backward pass knows of a chunk of queries: gradient of its values, log of all its
    weights, and the product of gradient and values."""

    gradient: jax.Array
    log: jax.Array
    delta: jax.Array


def zigzag_tokens(part: jax.Array | int, parts: int, size: int) -> jax.Array:
    """The places in the row of the `size` tokens that this part holds."""
    half = jnp.arange(size // 2, dtype=jnp.int32)
    return jnp.concatenate([part * (size // 2) + half, (2 * parts - 1 - part) * (size // 2) + half])


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def ring_attention(
    q_BTHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    document_BT: jax.Array | None,
    reach: AttentionSpec,
    axis: str,
    parts: int,
) -> jax.Array:
    """Causal attention over rows that `axis` splits into `parts`."""
    return _forward(q_BTHD, k_BTGD, v_BTGD, document_BT, reach, axis, parts)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array | None, reach: AttentionSpec, axis: str, parts: int
) -> tuple[jax.Array, Tree]:
    me = jax.lax.axis_index(axis)
    early, late = _queries(q, me, parts, document)

    def turn(
        visitor: Tree, number: jax.Array | int, found: tuple[PartialAttention, PartialAttention]
    ) -> tuple[PartialAttention, PartialAttention]:
        source = (me - number) % parts
        first, last = _chunks(visitor, source, parts)
        counts = source <= me
        side = _weigh(_where(counts, early, late), _where(counts, first, last), reach)
        front, back = found[0], _merged(found[1], _weigh(late, first, reach))
        return _where(counts, _merged(front, side), front), _where(counts, back, _merged(back, side))

    def rest(carry: Tree, number: jax.Array) -> tuple[Tree, None]:
        visitor = _passed(carry[0], axis, parts)
        return (visitor, turn(visitor, number, carry[1])), None

    own = (k, v, document)
    first, last = _chunks(own, me, parts)
    start = (_weigh(early, first, reach), _merged(_weigh(late, first, reach), _weigh(late, last, reach)))
    (_, found), _ = jax.lax.scan(rest, (own, start), jnp.arange(1, parts))
    out, log = (jnp.concatenate(halves, 1) for halves in zip(*found, strict=True))
    out, log = checkpoint_name(out.astype(q.dtype), ATTENTION), checkpoint_name(log, ATTENTION)
    return out, (q, k, v, document, out, log)


def _backward(
    reach: AttentionSpec, axis: str, parts: int, kept: Tree, gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    q, k, v, document, out, log = kept
    me = jax.lax.axis_index(axis)
    early, late = _queries(q, me, parts, document)
    delta = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    wanted_early, wanted_late = (
        GradientRequest(*half) for half in zip(*map(_halves, (gradient, log, delta)), strict=True)
    )

    def rest(carry: Tree, number: jax.Array) -> tuple[Tree, None]:
        visitor, gone = _passed(carry[:2], axis, parts)
        source = (me - number) % parts
        first, last = _chunks(visitor, source, parts)
        counts = source <= me
        dq_late, d_first = _pull(late, first, wanted_late, reach)
        dq_side, d_side = _pull(
            _where(counts, early, late), _where(counts, first, last), _where(counts, wanted_early, wanted_late), reach
        )
        nothing = jax.tree.map(jnp.zeros_like, (dq_side, d_side))
        front, back = _where(counts, (dq_side, d_side), nothing), _where(counts, nothing, (dq_side, d_side))
        gone = (_added(gone[0], d_first, front[1]), _added(gone[1], back[1]))
        found = (carry[2][0] + front[0], carry[2][1] + dq_late + back[0])
        return (visitor, gone, found), None

    own = (k, v, document)
    first, last = _chunks(own, me, parts)
    dq_early, d_front = _pull(early, first, wanted_early, reach)
    dq_cross, d_cross = _pull(late, first, wanted_late, reach)
    dq_late, d_back = _pull(late, last, wanted_late, reach)
    start = (own, (_added(d_front, d_cross), d_back), (dq_early, dq_cross + dq_late))
    (_, gone, found), _ = jax.lax.scan(rest, start, jnp.arange(1, parts))
    front, back = _passed(gone, axis, parts)
    dk, dv = (jnp.concatenate(halves, 1) for halves in zip(front, back, strict=True))
    return jnp.concatenate(found, 1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


ring_attention.defvjp(_forward, _backward)


def _weigh(queries: Queries, keys: Keys, reach: AttentionSpec) -> PartialAttention:
    length = queries.q.shape[1]
    return PartialAttention(
        *in_chunks(
            lambda part: attention_with_lse(part.q, keys.k, keys.v, reach, part.side, keys.side), queries, length
        )
    )


def _merged(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Both sets of keys together."""
    log = jnp.logaddexp(a.log, b.log)
    return PartialAttention(
        a.values * jnp.exp(a.log - log)[..., None] + b.values * jnp.exp(b.log - log)[..., None], log
    )


def _pull(
    queries: Queries, keys: Keys, wanted: GradientRequest, reach: AttentionSpec
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The gradients of queries, and of keys and values, through this pair of chunks.

    They are those of a sum whose weights are normalised by all keys, held fixed (Dao et al. 2022, B.2).
    """

    def chunk(k: jax.Array, v: jax.Array, part: tuple[Queries, GradientRequest]) -> jax.Array:
        (q, side), (gradient, log, delta) = part
        s, seen = attention_scores(q, k, reach), attention_mask(reach, side, keys.side)
        groups = (*q.shape[:2], k.shape[2], -1)
        s = s - jnp.moveaxis(log.reshape(groups), 1, 3)[..., None]
        p = jnp.exp(s if seen is None else jnp.where(seen[:, None, None], s, -jnp.inf))
        out = jnp.einsum("BGRTS,BSGD->BTGRD", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        along = (out * gradient.reshape(out.shape)).sum((2, 3, 4))
        return along - (p.sum(-1) * jnp.moveaxis(delta.reshape(groups), 1, 3)).sum((1, 2))

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return in_chunks(partial(chunk, k, v), (queries._replace(q=q), wanted), q.shape[1]).sum()

    dq, dk, dv = jax.grad(total, (0, 1, 2))(*(x.astype(jnp.float32) for x in (queries.q, keys.k, keys.v)))
    return dq, (dk, dv)


def _halves(x: jax.Array) -> list[jax.Array]:
    return jnp.split(x, 2, axis=1)


def _sides(part: jax.Array, parts: int, size: int, document: jax.Array | None) -> list[Positions]:
    places = jnp.split(zigzag_tokens(part, parts, size), 2)
    documents = [None, None] if document is None else _halves(document)
    return [Positions(at, doc) for at, doc in zip(places, documents, strict=True)]


def _queries(q: jax.Array, part: jax.Array, parts: int, document: jax.Array | None) -> list[Queries]:
    return [Queries(*half) for half in zip(_halves(q), _sides(part, parts, q.shape[1], document), strict=True)]


def _chunks(visitor: Tree, source: jax.Array, parts: int) -> list[Keys]:
    k, v, document = visitor
    sides = _sides(source, parts, k.shape[1], document)
    return [Keys(*half) for half in zip(_halves(k), _halves(v), sides, strict=True)]


def _where(condition: jax.Array, a: Tree, b: Tree) -> Tree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def _added(*pairs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jax.tree.map(lambda *parts: sum(parts), *pairs)


def _passed(tree: Tree, axis: str, parts: int) -> Tree:
    """Everything handed on to the next device of the ring."""
    to_next = [(i, (i + 1) % parts) for i in range(parts)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, to_next), tree)
