"""What a model may ask of the layout. It names no device, mesh axis or engine.

On one device each verb is the plain thing, which is what `Plain` does; under an engine the same
verbs are sharding constraints (`jit`) or collectives placed by hand (`shard_map`).

A row of tokens may be split along its `length`. Between layers it may be split further, into
`tokens`: then each device of a group that shares a layer's matrices keeps its own part of the
activations. `collect` and `scatter` go from one to the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.models.nn.attention import AttentionSpec, Positions, attention
from dtrain.models.nn.moe import ExpertWeights, Routing, grouped
from dtrain.models.nn.param import Tree
from dtrain.models.nn.remat import ATTENTION, INPUT, Policy, Remat, policy


@dataclass(frozen=True)
class Layers:
    """How a stack of equal layers is gone through."""

    remat: Remat | Policy = "none"
    """What is kept for the backward pass, by its name or as a policy of `jax.checkpoint`."""
    unroll: int = 1
    """Layers compiled one after the other in place of a loop over one."""


Block = Callable[[Tree, jax.Array, Tree, Any], tuple[jax.Array, Tree]]
"""(parameters of one layer, activations, what all layers share, context) → activations, sums."""


class Context(Protocol):
    """The verbs. Dims are named as in `Param.dims`; `None` is a dim that stays whole."""

    @property
    def loss_dtype(self) -> str:
        """The dtype in which losses are computed."""
        ...

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """x, laid out by the names of its dims."""
        ...

    def gather(self, params: Tree) -> Tree:
        """The parameters made whole where they are split only to save memory."""
        ...

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        """The full sum, where x was summed over this device's share of `dim`."""
        ...

    def largest(self, x: jax.Array, dim: str) -> jax.Array:
        """The largest over all shares of `dim`; passes no gradient."""
        ...

    def parts(self, dim: str) -> int:
        """Among how many devices the work along `dim` is split: 1 where each has all of it."""
        ...

    def first(self, dim: str, size: int) -> jax.Array | int:
        """Where this device's share of `dim` begins, a share being `size` long."""
        ...

    def lookup(self, table: Tree, token_BT: jax.Array) -> jax.Array:
        """The row (embed,) of each token, of a table (vocab, embed) that is not yet gathered.

        This device's share of `vocab` is not yet summed.
        """
        ...

    def places(self, length: int) -> jax.Array:
        """The place in its row of each token at hand: `length` of them, split by `length`."""
        ...

    def share(self, x_BT: jax.Array) -> jax.Array:
        """From `length` to `tokens`, where nothing is to be summed."""
        ...

    def collect(self, x_BTE: jax.Array) -> jax.Array:
        """From `tokens` to `length`."""
        ...

    def scatter(self, x_BTE: jax.Array, dim: str) -> jax.Array:
        """From `length` to `tokens`, summing over the shares of `dim`."""
        ...

    def whole_row(self, x_BT: jax.Array) -> jax.Array:
        """From `tokens` to all tokens of the row, in their order: an all-gather of something small."""
        ...

    def part_of_row(self, x_BT: jax.Array) -> jax.Array:
        """The other way: of a whole row the tokens at hand."""
        ...

    def attend(
        self,
        q_BTHD: jax.Array,
        k_BTGD: jax.Array,
        v_BTGD: jax.Array,
        reach: AttentionSpec,
        document_BT: jax.Array | None,
    ) -> jax.Array:
        """Attention, heads apart, within documents where rows hold several.

        Queries are split by `heads`, keys and values by `kv_heads`.
        """
        ...

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        """x through layers whose parameters are stacked along a leading `layer` dim, and their summed sums.

        Layer i is done by `blocks[i % len(blocks)]`. `shared` holds arrays (examples, ...).
        """
        ...

    def dispatch(self, tokens: Routing, experts: ExpertWeights) -> jax.Array:
        """Every token through the experts it chose: (B, T, embed).

        This device's share of `hidden` is not yet summed.
        """
        ...


@dataclass(frozen=True)
class SingleDeviceContext:
    """One device: nothing is split."""

    loss_dtype: str = "float32"

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        return x

    def gather(self, params: Tree) -> Tree:
        return params

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        return x

    def largest(self, x: jax.Array, dim: str) -> jax.Array:
        return jax.lax.stop_gradient(x)

    def parts(self, dim: str) -> int:
        return 1

    def first(self, dim: str, size: int) -> jax.Array | int:
        return 0

    def lookup(self, table: Tree, token_BT: jax.Array) -> jax.Array:
        return table[token_BT]

    def places(self, length: int) -> jax.Array:
        return jnp.arange(length, dtype=jnp.int32)

    def share(self, x_BT: jax.Array) -> jax.Array:
        return x_BT

    def collect(self, x_BTE: jax.Array) -> jax.Array:
        return x_BTE

    def scatter(self, x_BTE: jax.Array, dim: str) -> jax.Array:
        return x_BTE

    def whole_row(self, x_BT: jax.Array) -> jax.Array:
        return x_BT

    def part_of_row(self, x_BT: jax.Array) -> jax.Array:
        return x_BT

    def attend(
        self,
        q_BTHD: jax.Array,
        k_BTGD: jax.Array,
        v_BTGD: jax.Array,
        reach: AttentionSpec,
        document_BT: jax.Array | None,
    ) -> jax.Array:
        side = Positions(self.places(q_BTHD.shape[1]), document_BT)
        return checkpoint_name(attention(q_BTHD, k_BTGD, v_BTGD, reach, side), ATTENTION)

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        return scan_layers(blocks, params, x, shared, how, self)

    def dispatch(self, tokens: Routing, experts: ExpertWeights) -> jax.Array:
        return grouped(tokens, experts)


def scan_layers(
    blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree, how: Layers, ctx: Context
) -> tuple[jax.Array, Tree]:
    """One compiled round of blocks, applied to the layers in turn; sums are added up over layers."""
    rounds = [rematerialised(block, how.remat, ctx) for block in blocks]
    grouped = jax.tree.map(lambda p: p.reshape(p.shape[0] // len(rounds), len(rounds), *p.shape[1:]), params)

    def one(carry: jax.Array, layers: Tree) -> tuple[jax.Array, Tree]:
        found = []
        for i, block in enumerate(rounds):
            layer = jax.tree.map(lambda p, i=i: p[i], layers)
            carry, sums = block(layer, carry, shared)
            found.append(sums)
        return carry, jax.tree.map(lambda *parts: sum(parts), *found)

    out, sums = jax.lax.scan(one, x, grouped, unroll=min(how.unroll, len(jax.tree.leaves(grouped)[0])))
    return out, jax.tree.map(lambda per_round: per_round.sum(0), sums)


def rematerialised(
    block: Block, remat: Remat | Policy, ctx: Context
) -> Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]:
    """The block in this context, with what `remat` says kept for the backward pass."""

    def inside(layer: Tree, x: jax.Array, shared: Tree) -> tuple[jax.Array, Tree]:
        return block(layer, checkpoint_name(x, INPUT), shared, ctx)

    kept = remat if callable(remat) else policy(remat)
    return inside if kept is None else jax.checkpoint(inside, policy=kept, prevent_cse=False)
