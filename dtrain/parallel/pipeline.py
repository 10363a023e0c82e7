"""Pipeline parallelism: microbatches pass through stages of layers on different devices (GPipe, Huang et al. 2019).

Outside the stack of layers, each device of a pipeline has its own examples, so that they divide the work of embedding
and loss. Before the first layer all their rows are gathered; after the last layer each device gets its own rows back.
Of `microbatches + stages - 1` turns, each device works in `microbatches`; the rest is the pipeline bubble.
"""

from collections.abc import Callable
from math import gcd

import jax
import jax.numpy as jnp

from dtrain.core.counts import counted
from dtrain.models.nn.param import Tree
from dtrain.models.nn.vma import axes_of, vary

Stage = Callable[[jax.Array, Tree], tuple[jax.Array, Tree]]
"""(activations, arrays that all layers share) → activations, sums: the layers of this device."""


def bubble(stages: int, microbatches: int) -> float:
    """The fraction of time in which a device of the pipeline is idle."""
    return (stages - 1) / (microbatches + stages - 1)


def bubble_text(stages: int, microbatches: int) -> str:
    """How much of the time is bubble, and what reduces it if that is much."""
    idle = bubble(stages, microbatches)
    hint = f"; accumulate: {4 * stages} reduces it to {bubble(stages, 4 * stages):.0%}" if idle > 0.25 else ""
    parts = counted(microbatches, "microbatch", "microbatches")
    return f"pipeline of {stages} stages, {parts}: {idle:.0%} of the time is bubble{hint}"


def pipelined(
    layers: Stage, x: jax.Array, shared: Tree, axis: str, stages: int, microbatches: int
) -> tuple[jax.Array, Tree]:
    """x (examples of this device, ...) through the layers of all devices along `axis`, (examples, ...), and the sums of
    this device's layers. GPipe's schedule (Huang et al. 2019)."""
    # shared arrays with a dim of examples, such as documents, are split into microbatches; positions (1, T) are not
    batched = jax.tree.map(lambda leaf: leaf.shape[0] == x.shape[0], shared)
    all_x = jax.lax.all_gather(x, axis, axis=0, tiled=True)
    parts = gcd(microbatches, all_x.shape[0])
    micro = _split(all_x, parts)
    gathered = jax.tree.map(lambda s, b: jax.lax.all_gather(s, axis, axis=0, tiled=True) if b else s, shared, batched)
    with_micro = jax.tree.map(lambda s, b: _split(s, parts) if b else s, gathered, batched)
    me = jax.lax.axis_index(axis)

    # In turn t, stage s computes microbatch t - s, which stage s - 1 sent in turn t - 1. Outside 0 <= t - s < parts the
    # stage is in the bubble: it still computes, on arbitrary values, and the results are discarded.
    def turn(received: jax.Array, number: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Tree]]:
        index = number - me
        active, row = (index >= 0) & (index < parts), jnp.clip(index, 0, parts - 1)
        own = jax.tree.map(lambda s, b: s[row] if b else s, with_micro, batched)
        out, sums = layers(jnp.where(me == 0, micro[row], received), own)
        sums = jax.tree.map(lambda s: jnp.where(active, s, 0), sums)
        to_next = jax.lax.ppermute(out, axis, [(i, (i + 1) % stages) for i in range(stages)])
        return to_next, (out, sums)

    start = vary(jnp.zeros(micro.shape[1:], micro.dtype), axes_of(micro))
    _, (outs, sums) = jax.lax.scan(turn, start, jnp.arange(parts + stages - 1))
    # the last stage finishes microbatch m in turn m + stages - 1; the others contribute zeros to the reduce-scatter
    done = jnp.where(me == stages - 1, outs[stages - 1 :], 0).reshape(all_x.shape)
    own = jax.lax.psum_scatter(done, axis, scatter_dimension=0, tiled=True)
    return own, jax.tree.map(lambda s: s.sum(0), sums)


def _split(x: jax.Array, parts: int) -> jax.Array:
    return x.reshape(parts, -1, *x.shape[1:])
