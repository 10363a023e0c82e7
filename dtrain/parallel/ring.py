"""Ring attention: keys and values are passed around the devices that share a row (Liu et al. 2023).

Of 2P chunks of a row, device s of P holds chunks s (early) and 2P - 1 - s (late): the zigzag order of Llama 3 (Dubey
et al. 2024, section 3.3.2). So, under a causal mask, all devices do the same work in every turn: the late queries
attend to the visiting early keys, and of the pairs early-early and late-late exactly one is not masked.

The backward pass passes keys and values around again, together with their gradients, so that a device never holds
more than its own part and one visiting part.
Dims: B batch, T tokens of this device, S keys of one chunk, H query heads, G key-value heads, R query heads per group,
D head dim.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

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
    with_sink,
)
from dtrain.models.nn.param import Tree
from dtrain.models.nn.remat import ATTENTION


class Keys(NamedTuple):
    """Keys and values of one chunk (B, S, G, D), and their positions."""

    k: jax.Array
    v: jax.Array
    side: Positions


class Queries(NamedTuple):
    """Queries of one chunk (B, T, H, D), and their positions."""

    q: jax.Array
    side: Positions


class PartialAttention(NamedTuple):
    """Attention to some of the keys: values (B, T, H, D), and log-sum-exp of the scores (B, T, H)."""

    values: jax.Array
    log: jax.Array


class GradientRequest(NamedTuple):
    """Inputs of the backward pass for a chunk of queries: gradient of the output and the output (B, T, H, D), and the
    log-sum-exp over all keys (B, T, H)."""

    gradient: jax.Array
    out: jax.Array
    log: jax.Array


class PairAttention(Protocol):
    """Attention of one chunk of queries to one chunk of keys. `own`: both are the same tokens of the row; otherwise
    all keys come before all queries."""

    def attend(self, queries: Queries, keys: Keys, own: bool) -> PartialAttention:
        """Values and log-sum-exp over these keys alone, in float32."""
        ...

    def pull(
        self, queries: Queries, keys: Keys, request: GradientRequest, own: bool
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The gradients of queries, and of keys and values, through this pair of chunks, in float32.

        With P = exp(S - log), normalised over all keys, and delta the sum over D of gradient x out, dS = P x (dO V^T -
        delta) (Dao et al. 2022, appendix B.2).
        """
        ...


def zigzag_tokens(part: jax.Array | int, parts: int, size: int) -> jax.Array:
    """The positions in the row (size,) of the `size` tokens of this part: chunks `part` and 2 parts - 1 - part."""
    half = jnp.arange(size // 2, dtype=jnp.int32)
    return jnp.concatenate([part * (size // 2) + half, (2 * parts - 1 - part) * (size // 2) + half])


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def ring_attention(
    q_BTHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    document_BT: jax.Array | None,
    sink_H: jax.Array | None,
    pairs: PairAttention,
    axis: str,
    parts: int,
) -> jax.Array:
    """Causal attention over rows that `axis` splits into `parts`, in zigzag order: (B, T, H, D)."""
    return _forward(q_BTHD, k_BTGD, v_BTGD, document_BT, sink_H, pairs=pairs, axis=axis, parts=parts)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    document: jax.Array | None,
    sink: jax.Array | None,
    pairs: PairAttention,
    axis: str,
    parts: int,
) -> tuple[jax.Array, Tree]:
    me = jax.lax.axis_index(axis)
    early, late = _queries(q, me, parts, document)

    # `early`, `late`: own queries; `first`, `last`: visiting keys, in turn n those of device me - n. late-first is
    # never masked. With keys of an earlier device, early-first counts and late-last is masked; else the reverse.
    def turn(
        visitor: Tree, number: jax.Array | int, partial_results: tuple[PartialAttention, PartialAttention]
    ) -> tuple[PartialAttention, PartialAttention]:
        source = (me - number) % parts
        first, last = _chunks(visitor, source, parts)
        earlier = source <= me
        other = pairs.attend(_where(earlier, early, late), _where(earlier, first, last), own=False)
        front, back = partial_results[0], _merged(partial_results[1], pairs.attend(late, first, own=False))
        return _where(earlier, _merged(front, other), front), _where(earlier, back, _merged(back, other))

    def rest(carry: Tree, number: jax.Array) -> tuple[Tree, None]:
        visitor = _to_next_device(carry[0], axis, parts)
        return (visitor, turn(visitor, number, carry[1])), None

    own = (k, v, document)
    first, last = _chunks(own, me, parts)
    # turn 0, the own keys: three pairs of chunks, of which early-early and late-late are causal within the chunk
    early_to_first, late_to_last = (pairs.attend(*pair, own=True) for pair in ((early, first), (late, last)))
    start = (early_to_first, _merged(pairs.attend(late, first, own=False), late_to_last))
    (_, partial_results), _ = jax.lax.scan(rest, (own, start), jnp.arange(1, parts))
    out, log = (jnp.concatenate(halves, 1) for halves in zip(*partial_results, strict=True))
    out, log = (out, log) if sink is None else with_sink(out, log, sink)
    out, log = checkpoint_name(out.astype(q.dtype), ATTENTION), checkpoint_name(log, ATTENTION)
    return out, (q, k, v, document, sink, out, log)


def _backward(
    pairs: PairAttention, axis: str, parts: int, saved: Tree, gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    q, k, v, document, sink, out, log = saved
    me = jax.lax.axis_index(axis)
    early, late = _queries(q, me, parts, document)
    request_early, request_late = (
        GradientRequest(*half) for half in zip(*map(_halves, (gradient, out, log)), strict=True)
    )

    def rest(carry: Tree, number: jax.Array) -> tuple[Tree, None]:
        # the gradients of keys and values travel with them, and each device adds its part
        visitor, key_gradients = _to_next_device(carry[:2], axis, parts)
        source = (me - number) % parts
        first, last = _chunks(visitor, source, parts)
        earlier = source <= me  # the same choice of pairs as in the forward pass
        dq_late, d_first = pairs.pull(late, first, request_late, own=False)
        dq_other, d_other = pairs.pull(
            _where(earlier, early, late),
            _where(earlier, first, last),
            _where(earlier, request_early, request_late),
            own=False,
        )
        zeros = jax.tree.map(jnp.zeros_like, (dq_other, d_other))
        front, back = _where(earlier, (dq_other, d_other), zeros), _where(earlier, zeros, (dq_other, d_other))
        key_gradients = (_added(key_gradients[0], d_first, front[1]), _added(key_gradients[1], back[1]))
        dq = (carry[2][0] + front[0], carry[2][1] + dq_late + back[0])
        return (visitor, key_gradients, dq), None

    own = (k, v, document)
    first, last = _chunks(own, me, parts)
    dq_early, d_front = pairs.pull(early, first, request_early, own=True)
    dq_cross, d_cross = pairs.pull(late, first, request_late, own=False)
    dq_late, d_back = pairs.pull(late, last, request_late, own=True)
    start = (own, (_added(d_front, d_cross), d_back), (dq_early, dq_cross + dq_late))
    (_, key_gradients, dq), _ = jax.lax.scan(rest, start, jnp.arange(1, parts))
    front, back = _to_next_device(key_gradients, axis, parts)  # after parts turns, back on their own device
    dk, dv = (jnp.concatenate(halves, 1) for halves in zip(front, back, strict=True))
    of_sink = None if sink is None else _of_sink(gradient, out, log, sink)
    return jnp.concatenate(dq, 1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, of_sink


def _of_sink(gradient: jax.Array, out: jax.Array, log: jax.Array, sink: jax.Array) -> jax.Array:
    """The gradient of the sinks (H,): dS = P x (dO V^T - delta) with V = 0, summed over rows and queries."""
    delta_BTH = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    return -(jnp.exp(sink.astype(jnp.float32)[None, None] - log) * delta_BTH).sum((0, 1)).astype(sink.dtype)


ring_attention.defvjp(_forward, _backward)


@dataclass(frozen=True)
class PlainPairs:
    """In plain JAX, for every mask; the positions say which keys a query attends to. Scores are in main memory."""

    spec: AttentionSpec

    def attend(self, queries: Queries, keys: Keys, own: bool) -> PartialAttention:
        """Values and log-sum-exp, as `PairAttention` says."""
        del own

        def chunk(part: Queries) -> tuple[jax.Array, jax.Array]:
            return attention_with_lse(part.q, keys.k, keys.v, spec=self.spec, queries=part.side, keys=keys.side)

        return PartialAttention(*in_chunks(chunk, queries, queries.q.shape[1]))

    def pull(
        self, queries: Queries, keys: Keys, request: GradientRequest, own: bool
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The gradients, as `PairAttention` says.

        They are those of sum(dO x P V) - sum(P x delta) with log and delta held constant, which `chunk` computes.
        """
        del own

        def chunk(k: jax.Array, v: jax.Array, part: tuple[Queries, GradientRequest]) -> jax.Array:
            (q, side), (gradient, out, log) = part
            delta = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
            s, mask = attention_scores(q, k, self.spec), attention_mask(self.spec, side, keys.side)
            groups = (*q.shape[:2], k.shape[2], -1)
            s = s - jnp.moveaxis(log.reshape(groups), 1, 3)[..., None]
            p = jnp.exp(s if mask is None else jnp.where(mask[:, None, None], s, -jnp.inf))
            mixed = jnp.einsum("BGRTS,BSGD->BTGRD", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
            along = (mixed * gradient.reshape(mixed.shape)).sum((2, 3, 4))
            return along - (p.sum(-1) * jnp.moveaxis(delta.reshape(groups), 1, 3)).sum((1, 2))

        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return in_chunks(partial(chunk, k, v), (queries._replace(q=q), request), q.shape[1]).sum()

        dq, dk, dv = jax.grad(total, (0, 1, 2))(*(x.astype(jnp.float32) for x in (queries.q, keys.k, keys.v)))
        return dq, (dk, dv)


def _merged(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Merge attention to two disjoint sets of keys (Dao et al. 2022, section 3.1).

    log = log(exp(a.log) + exp(b.log)), and each result is weighted by its part of the sum, exp(its log - log).
    """
    log = jnp.logaddexp(a.log, b.log)
    return PartialAttention(
        a.values * jnp.exp(a.log - log)[..., None] + b.values * jnp.exp(b.log - log)[..., None], log
    )


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


def _to_next_device(tree: Tree, axis: str, parts: int) -> Tree:
    """Send every array to the next device of the ring (ppermute); the result comes from the previous device."""
    to_next = [(i, (i + 1) % parts) for i in range(parts)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, to_next), tree)
