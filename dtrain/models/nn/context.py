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

from dtrain.data.batch import TOKEN, Batch
from dtrain.models.nn.attention import AttentionSpec
from dtrain.models.nn.moe import ExpertWeights, Routing
from dtrain.models.nn.param import Tree
from dtrain.models.nn.remat import Policy, Remat


@dataclass(frozen=True)
class Layers:
    """How a stack of equal layers is compiled."""

    remat: Remat | tuple[str, ...] | Policy = "none"
    """What is saved for the backward pass: a policy's name, the names of values, or a policy of `jax.checkpoint`."""
    unroll: int = 1
    """Iterations of the loop over layers that are unrolled: `unroll` of `jax.lax.scan`."""
    groups: Sequence[str] = ()
    """For each of the blocks the name of the group of its parameters; (): all have the same shapes."""
    tables: Sequence[str] = ()
    """Of a layer's parameters the tables of tokens: blocks get the rows of their tokens in place of them."""

    def looked_up(self, params: Tree, shared: Tree, ctx: "Context") -> Tree:
        """The layers' parameters with the row (B, T, embed) of each token of `shared` in place of tables."""
        if not self.tables:
            return params
        if self.groups:
            return {name: stack | self.rows(stack, shared, ctx, stacked=True) for name, stack in params.items()}
        return params | self.rows(params, shared, ctx, stacked=True)

    def rows(self, layers: Tree, shared: Tree, ctx: "Context", *, stacked: bool) -> Tree:
        """Of a stack of layers, or of one layer, those rows by the name of their table."""
        rows = {name: ctx.lookup(layers[name], shared[TOKEN], stacked=stacked) for name in self.tables}
        rows = {name: ctx.scatter(row, "vocab") for name, row in rows.items()}
        return {name: jnp.moveaxis(row, 2, 0) if stacked else row for name, row in rows.items()}

    def but_tables(self, change: Callable[[Tree], Tree], layer: Tree) -> Tree:
        """`change` of a layer's parameters, or of a stack of layers, but for those that `looked_up` replaced."""
        if not self.tables:
            return change(layer)
        tables = {name: layer[name] for name in self.tables}
        return change({name: part for name, part in layer.items() if name not in tables}) | tables


LATER = "later"
"""Among the sums of a layer: arrays by name that all later layers of the round share. It has a block of its own."""

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

    @property
    def train(self) -> bool:
        """Whether this is a training step; False in evaluations and predictions."""
        ...

    @property
    def step(self) -> Any:
        """The number of updates before this step, int32 (): of a model of a user's own; 0 for others."""
        ...

    @property
    def keeps_keys(self) -> bool:
        """Whether keys and values are kept for the tokens that follow, as in generation."""
        ...

    @property
    def example_axes(self) -> tuple[str, ...]:
        """The names of the mesh axes that split the examples, for collectives of JAX. jit: none, arrays are global."""
        ...

    @property
    def mixed(self) -> list[str]:
        """What has compared examples with each other in a way that is the same on every mesh."""
        ...

    def keys(self, batch: Batch, name: str = "") -> jax.Array:
        """A random key for each example of a batch (examples,), the same on any mesh and engine.

        Folded from the recipe's seed, `name` and the number of the row in the run; in an evaluation, a prediction or
        for samples from that of the example in its split, so that each of them draws the same numbers every time.
        Different names give independent keys. RecipeError if two calls have one name. No communication.
        """
        ...

    def sum_over_examples(self, x: jax.Array) -> jax.Array:
        """The sum (...) over all examples of a microbatch, where x (...) is a sum over this device's examples.

        shard_map and pmap: a psum over the axes that split examples. jit: x itself, which is a sum over all of them.
        """
        ...

    def gather_examples(self, x: jax.Array) -> jax.Array:
        """x (examples, ...) for all examples of a microbatch. shard_map and pmap: an all-gather. jit: x itself."""
        ...

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """x (*dims), sharded by the names of its dims. shard_map: x itself, a shard. jit: a sharding constraint."""
        ...

    def gather(self, params: Tree) -> Tree:
        """The full parameters, where `fsdp` splits them to save memory; must be called before they are used.

        shard_map: an all-gather over fsdp, whose gradient is a reduce-scatter. jit: the compiler inserts the same.
        """
        ...

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        """The full sum (...), where x (...) is a sum over this device's share of `dim`, such as a product over it.

        shard_map: a psum over the axes that split `dim`. jit: x itself; the compiler inserts the all-reduce.
        """
        ...

    def largest(self, x: jax.Array, dim: str) -> jax.Array:
        """The maximum of x (...) over all shares of `dim`, without gradient. shard_map: a pmax. jit: x itself."""
        ...

    def parts(self, dim: str) -> int:
        """The number of devices that split the work along `dim`; 1 if each device does all of it. No communication."""
        ...

    def first(self, dim: str, size: int) -> jax.Array | int:
        """The offset of this device's share, of length `size`, of `dim`. shard_map: `axis_index` x `size`. jit: 0."""
        ...

    def lookup(self, table: Tree, token_BT: jax.Array, *, stacked: bool = False) -> jax.Array:
        """The row of each token (B, T, embed), from a table (vocab, embed) that is not yet gathered. `stacked`: of
        tables of several layers (layers, vocab, embed) all at once (B, T, layers, embed).

        Rows of words outside this device's share of `vocab` are zero: sum with `reduce` or `scatter`. Columns that fsdp
        splits: an all-gather of tokens and an all-to-all of columns; under jit, collectives for other tables are the
        compiler's. RecipeError under shard_map for a table whose first dim is not split like `vocab`.
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
        sink_H: jax.Array | None = None,
    ) -> jax.Array:
        """Attention (B, T, H, D), per head, and within documents in packed rows.

        Queries are split by `heads`, keys and values by `kv_heads`, all by `length`. `sink_H`: of each head the score
        of one more key, whose value is zero.
        shard_map: a local kernel; with mesh.sequence, ring attention (ppermute of keys and values). jit: the same in a
        `shard_map` region, except on CPUs without mesh.sequence, where the compiler splits plain attention.
        """
        ...

    def for_later(self, k_BTGD: jax.Array, v_BTGD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What later layers attend to that share this layer's keys and values, after it attended to them itself.

        The keys and values; in generation those of all tokens so far, for `attend` of a layer that keeps none. No
        communication.
        """
        ...

    def of_tokens(self, x: jax.Array) -> jax.Array:
        """x (B, T, ...), and zero where there is no token: before shorter rows, in generation. No communication."""
        ...

    def preceding(self, x: jax.Array, count: int, name: str) -> jax.Array:
        """x (B, T, ...) with the `count` tokens before it: (B, count + T, ...). Inside a layer, for whole rows.

        They are zeros; in generation those that the layer was given under this name before. No communication.
        """
        ...

    def recurrent(self, step: Callable[[jax.Array], tuple[jax.Array, jax.Array]], state: jax.Array) -> jax.Array:
        """The first result of `step`: state → (activations, state after the last token). Inside a layer, once.

        The state is the one given; in generation that after the layer's earlier tokens. No communication.
        """
        ...

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        """Apply layers whose parameters are stacked along a leading `layer` dim: (activations, sums over the layers).

        Layer i is `blocks[i % len(blocks)]`. `shared` holds arrays (examples, length, ...) for all layers, or (1, ...).
        Of layers in groups, `params` has a stack for each group.
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
