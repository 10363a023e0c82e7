"""The verbs of `Context` on one device, and the loop over layers that all contexts share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.models.nn.attention import AttentionSpec, Positions, attention
from dtrain.models.nn.context import Block, Context, Layers
from dtrain.models.nn.examples import ExampleVerbs
from dtrain.models.nn.moe import ExpertWeights, Routing, grouped
from dtrain.models.nn.param import Tree
from dtrain.models.nn.remat import ATTENTION, INPUT, Policy, Remat, policy


@dataclass(frozen=True)
class SingleDeviceContext(ExampleVerbs):
    """The verbs on one device: nothing is split."""

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
        spec: AttentionSpec,
        document_BT: jax.Array | None,
    ) -> jax.Array:
        positions = Positions(self.places(q_BTHD.shape[1]), document_BT)
        return checkpoint_name(attention(q_BTHD, k_BTGD, v_BTGD, spec, positions), ATTENTION)

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        return scan_layers(blocks, params, x, shared=shared, how=how, ctx=self)

    def dispatch(self, tokens: Routing, experts: ExpertWeights) -> jax.Array:
        return grouped(tokens, experts)


def scan_layers(
    blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree, how: Layers, ctx: Context
) -> tuple[jax.Array, Tree]:
    """Scan over the layers and add their sums; one iteration applies each block once: of two, layers 2i and 2i + 1."""
    remat_blocks = [rematerialised(block, how.remat, ctx) for block in blocks]
    count = len(remat_blocks)
    per_round = jax.tree.map(lambda p: p.reshape(p.shape[0] // count, count, *p.shape[1:]), params)

    def apply_round(carry: jax.Array, layers: Tree) -> tuple[jax.Array, Tree]:
        sums_of_round = []
        for i, block in enumerate(remat_blocks):
            layer = jax.tree.map(lambda p, i=i: p[i], layers)
            carry, sums = block(layer, carry, shared)
            sums_of_round.append(sums)
        return carry, jax.tree.map(lambda *parts: sum(parts), *sums_of_round)

    out, sums = jax.lax.scan(apply_round, x, per_round, unroll=min(how.unroll, len(jax.tree.leaves(per_round)[0])))
    return out, jax.tree.map(lambda s: s.sum(0), sums)


def rematerialised(
    block: Block, remat: Remat | tuple[str, ...] | Policy, ctx: Context
) -> Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]:
    """The block in this context; the backward pass recomputes what `remat` does not save."""

    def inside(layer: Tree, x: jax.Array, shared: Tree) -> tuple[jax.Array, Tree]:
        return block(layer, checkpoint_name(x, INPUT), shared, ctx)

    save_policy = remat if callable(remat) else policy(remat)
    return inside if save_policy is None else jax.checkpoint(inside, policy=save_policy, prevent_cse=False)
