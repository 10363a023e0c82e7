"""`Context`: the operations by which a model is distributed, without naming a device, mesh axis or engine.

On one device each verb is the plain operation (`SingleDeviceContext`). Under `jit` the verbs are sharding constraints,
from which the compiler derives collectives; under `shard_map` they are explicit collectives.

A row of tokens may be split along its `length` (mesh.sequence). Between layers it may be split further, into `tokens`,
over the devices of `mesh.tensor`, so that each holds only its part of the activations (sequence parallelism,
Korthikanti et al. 2022). `collect` and `scatter` convert between the two.
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
    """How a stack of equal layers is compiled."""

    remat: Remat | Policy = "none"
    """What is saved for the backward pass: a name, or a policy of `jax.checkpoint`."""
    unroll: int = 1
    """Iterations of the loop over layers that are unrolled: `unroll` of `jax.lax.scan`."""


Block = Callable[[Tree, jax.Array, Tree, Any], tuple[jax.Array, Tree]]
"""(parameters of one layer, activations, arrays that all layers share, context) → activations, sums."""


class Context(Protocol):
    """The verbs. Dims are named as in `Param.dims`; `None` is a dim that is not split.

    A *share* of a dim is the part of it that this device computes when the mesh splits the work along that dim.
    """

    @property
    def loss_dtype(self) -> str:
        """The dtype in which losses are computed."""
        ...

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """x, sharded by the names of its dims. shard_map: x itself, a shard already. jit: a sharding constraint."""
        ...

    def gather(self, params: Tree) -> Tree:
        """The full parameters, where `fsdp` splits them to save memory; must be called before they are used.

        shard_map: an all-gather over fsdp, whose gradient is a reduce-scatter. jit: the compiler inserts the same.
        """
        ...

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        """The full sum, where x is a sum over this device's share of `dim`, such as a product that contracts it.

        shard_map: a psum over the axes that split `dim`. jit: x itself; the compiler inserts the all-reduce.
        """
        ...

    def largest(self, x: jax.Array, dim: str) -> jax.Array:
        """The maximum over all shares of `dim`, without gradient. shard_map: a pmax. jit: x itself, which is global."""
        ...

    def parts(self, dim: str) -> int:
        """The number of devices that split the work along `dim`; 1 if each device does all of it. No communication."""
        ...

    def first(self, dim: str, size: int) -> jax.Array | int:
        """The offset of this device's share, of length `size`, of `dim`. shard_map: `axis_index` x `size`. jit: 0."""
        ...

    def lookup(self, table: Tree, token_BT: jax.Array) -> jax.Array:
        """The row of each token (B, T, embed), from a table (vocab, embed) that is not yet gathered.

        Rows of words outside this device's share of `vocab` are zero: sum with `reduce` or `scatter`. shard_map: over
        fsdp, an all-gather of tokens and an all-to-all of columns. jit: the compiler inserts the collectives.
        """
        ...

    def places(self, length: int) -> jax.Array:
        """The position in the row of each of `length` tokens: (length,). No communication.

        In the zigzag order of `mesh.sequence`. shard_map: those of this device's tokens. jit: those of the full row.
        """
        ...

    def share(self, x_BT: jax.Array) -> jax.Array:
        """From `length` to `tokens`, without a sum. shard_map: a local slice. jit: a constraint to `tokens`."""
        ...

    def collect(self, x_BTE: jax.Array) -> jax.Array:
        """From `tokens` to `length`. shard_map: an all-gather over tensor. jit: a sharding constraint to `length`."""
        ...

    def scatter(self, x_BTE: jax.Array, dim: str) -> jax.Array:
        """From `length` to `tokens`, summed over `dim`. shard_map: a reduce-scatter. jit: a constraint to `tokens`."""
        ...

    def whole_row(self, x_BT: jax.Array) -> jax.Array:
        """From `tokens` to all tokens of the row, in the order of the row; for small arrays only.

        shard_map: all-gathers over tensor and sequence. jit: a sharding constraint that splits only the batch.
        """
        ...

    def part_of_row(self, x_BT: jax.Array) -> jax.Array:
        """The inverse of `whole_row`. shard_map: a local index. jit: a sharding constraint to `tokens`."""
        ...

    def attend(
        self,
        q_BTHD: jax.Array,
        k_BTGD: jax.Array,
        v_BTGD: jax.Array,
        spec: AttentionSpec,
        document_BT: jax.Array | None,
    ) -> jax.Array:
        """Attention (B, T, H, D), per head, and within documents in packed rows.

        Queries are split by `heads`, keys and values by `kv_heads`, all by `length`.
        shard_map: a local kernel; with mesh.sequence, ring attention (ppermute of keys and values). jit: the same in a
        `shard_map` region, except on CPUs without mesh.sequence, where the compiler splits plain attention.
        """
        ...

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        """Apply layers whose parameters are stacked along a leading `layer` dim: (activations, sums over the layers).

        Layer i is `blocks[i % len(blocks)]`. `shared` holds arrays (examples, ...) for all layers.
        shard_map: a scan that all-gathers each layer over fsdp; with mesh.pipeline also an all-gather of examples,
        ppermute between stages, a reduce-scatter of results. jit: a scan; the pipeline in a `shard_map` region.
        """
        ...

    def dispatch(self, tokens: Routing, experts: ExpertWeights) -> jax.Array:
        """Each token through its experts, weighted by its gates and summed: (B, T, embed).

        Summed over this device's share of `hidden` only: sum with `reduce` or `scatter`.
        shard_map: with mesh.expert, an all-to-all to the experts' devices and one back. jit: the same in a `shard_map`
        region, and a psum over `hidden`.
        """
        ...


@dataclass(frozen=True)
class SingleDeviceContext:
    """The verbs on one device: nothing is split."""

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
    block: Block, remat: Remat | Policy, ctx: Context
) -> Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]:
    """The block in this context; the backward pass recomputes what `remat` does not save."""

    def inside(layer: Tree, x: jax.Array, shared: Tree) -> tuple[jax.Array, Tree]:
        return block(layer, checkpoint_name(x, INPUT), shared, ctx)

    save_policy = remat if callable(remat) else policy(remat)
    return inside if save_policy is None else jax.checkpoint(inside, policy=save_policy, prevent_cse=False)
