"""Tokens sent to the devices that hold their experts, and back.

Dims: N tokens held here, K experts chosen by each, E embed, P devices along the expert axis.
"""

import math

import jax
import jax.numpy as jnp

from dtrain.models.nn.moe import ExpertWeights, Routing, in_order
from dtrain.models.nn.vma import axes_of, vary


def exchanged(tokens: Routing, experts: ExpertWeights, axis: str, parts: int) -> jax.Array:
    """Every token through the experts it chose, wherever along `axis` they are.

    Two all-to-alls of equal blocks, one for each other device. A block has room for the worst case: every token
    here to the experts of one device, or of each row as many as those experts take. Nothing is dropped here; what
    the router dropped has no expert's number and gives zero.
    """
    x_NE, chosen_NK, gates_NK = tokens.rows
    (count, active), own = chosen_NK.shape, experts.count
    room = count * min(active, own)
    if experts.most is not None:
        room = min(room, math.prod(tokens.x.shape[:-2]) * own * experts.most)
    expert = chosen_NK.reshape(-1)
    slot = _slots(expert // own, parts, room)
    rows = jnp.repeat(x_NE, active, 0)
    sent = _blank(rows, (parts * room, rows.shape[1]), 0).at[slot].set(rows, mode="drop")
    numbers = _blank(expert, (parts * room,), own).at[slot].set(expert % own, mode="drop")
    gates = gates_NK.reshape(-1)
    weights = _blank(gates, (parts * room,), 0).at[slot].set(gates, mode="drop")
    here, weighed, which = (_swapped(block, axis, parts) for block in (sent, weights, numbers))
    back = _swapped(in_order(here, weighed, which, experts), axis, parts)
    out = back.at[slot].get(mode="fill", fill_value=0)
    return out.reshape(count, active, -1).sum(1).reshape(tokens.x.shape)


def _slots(to: jax.Array, parts: int, room: int) -> jax.Array:
    """Where each row goes in the blocks sent: its device's block, in order of arrival; none where it is full."""
    onto = jax.nn.one_hot(to, parts, dtype=jnp.int32)
    place = (jnp.cumsum(onto, 0) * onto).sum(1) - 1
    return jnp.where((to < parts) & (place < room), to * room + place, parts * room)


def _blank(like: jax.Array, shape: tuple[int, ...], value: int) -> jax.Array:
    """An array of one value that varies over the mesh as `like` does."""
    return vary(jnp.full(shape, value, like.dtype), axes_of(like))


def _swapped(x: jax.Array, axis: str, parts: int) -> jax.Array:
    """Block i of this device goes to device i."""
    blocks = x.reshape(parts, -1, *x.shape[1:])
    return jax.lax.all_to_all(blocks, axis, 0, 0).reshape(x.shape)
