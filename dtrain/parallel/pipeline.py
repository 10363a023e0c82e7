"""The stack of layers split over devices, microbatches going from one to the next (Huang et al. 2019).

Outside the stack the devices of a pipeline hold examples of their own, so that embedding and loss
are shared out among them. At its entry the rows are gathered, at its exit each device gets its own
back. Of `microbatches + stages - 1` turns each device works in `microbatches`; the rest is the bubble.
"""

from collections.abc import Callable
from math import gcd

import jax
import jax.numpy as jnp

from dtrain.models.nn.param import Tree
from dtrain.models.nn.vma import axes_of, vary

Stage = Callable[[jax.Array, Tree], tuple[jax.Array, Tree]]
"""(activations, what all layers share) → activations and sums: the layers of this device."""


def bubble(stages: int, microbatches: int) -> float:
    """The part of the time in which a device of the pipeline has nothing to do."""
    return (stages - 1) / (microbatches + stages - 1)


def pipelined(
    layers: Stage, x: jax.Array, shared: Tree, axis: str, stages: int, microbatches: int
) -> tuple[jax.Array, Tree]:
    """x, this device's examples, through the layers of all devices along `axis`; sums of this device's layers."""
    batched = jax.tree.map(lambda leaf: leaf.shape[0] == x.shape[0], shared)
    all_x = jax.lax.all_gather(x, axis, axis=0, tiled=True)
    parts = gcd(microbatches, all_x.shape[0])
    micro = _split(all_x, parts)
    gathered = jax.tree.map(lambda s, b: jax.lax.all_gather(s, axis, axis=0, tiled=True) if b else s, shared, batched)
    with_micro = jax.tree.map(lambda s, b: _split(s, parts) if b else s, gathered, batched)
    me = jax.lax.axis_index(axis)

    def turn(received: jax.Array, number: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Tree]]:
        at = number - me
        live, row = (at >= 0) & (at < parts), jnp.clip(at, 0, parts - 1)
        own = jax.tree.map(lambda s, b: s[row] if b else s, with_micro, batched)
        out, sums = layers(jnp.where(me == 0, micro[row], received), own)
        sums = jax.tree.map(lambda s: jnp.where(live, s, 0), sums)
        onward = jax.lax.ppermute(out, axis, [(i, (i + 1) % stages) for i in range(stages)])
        return onward, (out, sums)

    start = vary(jnp.zeros(micro.shape[1:], micro.dtype), axes_of(micro))
    _, (outs, sums) = jax.lax.scan(turn, start, jnp.arange(parts + stages - 1))
    done = jnp.where(me == stages - 1, outs[stages - 1 :], 0).reshape(all_x.shape)
    own = jax.lax.psum_scatter(done, axis, scatter_dimension=0, tiled=True)
    return own, jax.tree.map(lambda s: s.sum(0), sums)


def _split(x: jax.Array, parts: int) -> jax.Array:
    return x.reshape(parts, -1, *x.shape[1:])
