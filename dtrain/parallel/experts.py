"""Expert parallelism: tokens are sent to the devices of their experts, and the results back (Lepikhin et al. 2020).

Dims: N tokens of this device, K experts chosen by each, E embed, P devices along the expert axis.
"""

import math

import jax
import jax.numpy as jnp

from dtrain.models.nn.moe import ExpertWeights, Routing, in_order
from dtrain.models.nn.vma import axes_of, vary


def exchanged(tokens: Routing, experts: ExpertWeights, axis: str, parts: int) -> jax.Array:
    """Each token through its experts on any device along `axis`, weighted by its gates and summed: (..., embed).

    One all-to-all to the experts and one back, in blocks of equal size, one block for each device. A block has room for
    the worst case: all tokens of this device go to the experts of one device, up to the capacity of those experts in
    each row. So no token is dropped here; choices that the router dropped have no expert's number and give zeros.
    """
    x_NE, chosen_NK, gates_NK = tokens.rows
    (count, active), own = chosen_NK.shape, experts.count
    room = count * min(active, own)  # a token chooses each expert once
    if experts.most is not None:
        room = min(room, math.prod(tokens.x.shape[:-2]) * own * experts.most)
    expert = chosen_NK.reshape(-1)
    # Device p has experts p x own to (p + 1) x own - 1: expert // own is the device, expert % own the number there.
    # Unused slots have the number `own`, which no expert has.
    slot = _slots(expert // own, parts, room)
    rows = jnp.repeat(x_NE, active, 0)
    sent = _blank(rows, (parts * room, rows.shape[1]), 0).at[slot].set(rows, mode="drop")
    numbers = _blank(expert, (parts * room,), own).at[slot].set(expert % own, mode="drop")
    gates = gates_NK.reshape(-1)
    weights = _blank(gates, (parts * room,), 0).at[slot].set(gates, mode="drop")
    received, received_gates, received_numbers = (_all_to_all(block, axis, parts) for block in (sent, weights, numbers))
    back = _all_to_all(in_order(received, received_gates, received_numbers, experts), axis, parts)
    # results come back in the slots that the rows were sent in
    out = back.at[slot].get(mode="fill", fill_value=0)
    return out.reshape(count, active, -1).sum(1).reshape(tokens.x.shape)


def _slots(to: jax.Array, parts: int, room: int) -> jax.Array:
    """The slot of each row in the blocks to send: block `to`, in the order of rows.

    A row for no device, or for a full block, gets the slot after the last one, which scatter (`drop`) and gather
    (`fill`) ignore.
    """
    onto = jax.nn.one_hot(to, parts, dtype=jnp.int32)
    place = (jnp.cumsum(onto, 0) * onto).sum(1) - 1  # number of earlier rows for the same device
    return jnp.where((to < parts) & (place < room), to * room + place, parts * room)


def _blank(like: jax.Array, shape: tuple[int, ...], value: int) -> jax.Array:
    """An array filled with a value, with the dtype of `like` and varying over the same mesh axes."""
    return vary(jnp.full(shape, value, like.dtype), axes_of(like))


def _all_to_all(x: jax.Array, axis: str, parts: int) -> jax.Array:
    """Send block i to device i; block i of the result comes from device i."""
    blocks = x.reshape(parts, -1, *x.shape[1:])
    return jax.lax.all_to_all(blocks, axis, 0, 0).reshape(x.shape)
