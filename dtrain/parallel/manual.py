"""The verbs of `Context` as explicit collectives, inside `jax.shard_map`.

Arrays are this device's shards. Dims: B its examples, T its tokens (by `length`, or fewer by `tokens`), E embed,
H its query heads, G its key-value heads, D head dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint

from dtrain.core.errors import RecipeError
from dtrain.models.nn.attention import AttentionSpec
from dtrain.models.nn.context import Block, Layers
from dtrain.models.nn.examples import ExampleVerbs
from dtrain.models.nn.moe import ExpertWeights, Routing, grouped, in_order
from dtrain.models.nn.param import Tree
from dtrain.models.nn.remat import PRODUCT, regather
from dtrain.models.nn.single_device import rows_of, scan_layers
from dtrain.models.nn.vma import axes_of, varied, vary
from dtrain.parallel.gather import NotGathered, gathered, is_wrapped, summed
from dtrain.parallel.kernels import grouped_product, local_attention, pair_attention
from dtrain.parallel.mesh import EXPERT, FSDP_AXES, PIPELINE, SEQUENCE
from dtrain.parallel.pipeline import pipelined
from dtrain.parallel.ring import ring_attention, zigzag_tokens
from dtrain.parallel.rules import Layout, zigzag_positions


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


def _flat(entry: Any) -> tuple[Any, ...]:
    """The axes of an entry of a PartitionSpec."""
    return entry if isinstance(entry, tuple) else (entry,)


@dataclass(frozen=True)
class ShardMapContext(ExampleVerbs):
    """The verbs inside a `shard_map` region."""

    layout: Layout
    microbatches: int = 1
    """Microbatches in the pipeline at the same time."""

    @property
    def example_axes(self) -> tuple[str, ...]:
        return self.layout.batch_axes

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        return x

    def gather(self, params: Tree) -> Tree:
        def gather_one(part: NotGathered) -> Any:
            # Axes are matched from the last dim.
            x, entries = part.value, enumerate(part.axes[len(part.axes) - part.value.ndim :])
            cuts = tuple((dim, axes) for dim, entry in entries if (axes := self._memory_axes(entry)))
            return part.completed(gathered(x, cuts, part.dtype or str(x.dtype), str(x.dtype)), gather_one)

        return jax.tree.map(gather_one, params, is_leaf=is_wrapped)

    def _memory_axes(self, entry: Any) -> tuple[str, ...]:
        """Of the axes that split a dim of a parameter, those that only save memory."""
        return tuple(axis for axis in _flat(entry) if axis in FSDP_AXES)

    def _work_axes(self, dim: str) -> tuple[str, ...]:
        """The axes that split the work along `dim`."""
        return tuple(axis for axis in self.layout.axes(dim) if axis not in FSDP_AXES)

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        same = [axis for axis in self._work_axes(dim) if axis not in axes_of(x)]
        if same:  # a psum would multiply x by the number of devices
            message = f"ctx.reduce(x, {dim!r}): x is the same on every device of {same[0]}, not a partial sum"
            raise RecipeError(message, f"call it only after a product that sums over a dim named {dim}")
        return summed(x, self._work_axes(dim))

    def largest(self, x: jax.Array, dim: str) -> jax.Array:
        axes = tuple(axis for axis in self._work_axes(dim) if axis in axes_of(x))
        x = jax.lax.stop_gradient(x)
        return jax.lax.pmax(x, axes) if axes else x

    def parts(self, dim: str) -> int:
        return self.layout.shares(dim)

    def first(self, dim: str, size: int) -> jax.Array | int:
        axes = self._work_axes(dim)
        return jax.lax.axis_index(axes) * size if axes else 0

    def lookup(self, table: Tree, token_BT: jax.Array, *, stacked: bool = False) -> jax.Array:
        """Each device has all rows of its share of `vocab`, but with fsdp only some columns (embed / fsdp).

        Token ids are all-gathered over fsdp: (fsdp x B, T). Each device looks up its columns for all of them, and an
        all-to-all exchanges: each device keeps its own B and gets all columns. Rows outside this device's share of
        `vocab` are zero, so that a sum over the shares gives the row. Tables of several layers are exchanged at once.
        """
        dims = table.value.ndim - stacked
        split, axes = tuple(filter(None, _flat(table.axes[-dims]))), self._memory_axes(table.axes[-1])
        if split != self._work_axes("vocab") or (axes and (dims, token_BT.ndim) != (2, 2)):
            how = f"this one has {dims} dims, the first split over {' and '.join(split) or 'no axis'}"
            hint = "name the dims of the table `vocab embed` and look up ids (examples, tokens), or set engine: jit"
            raise RecipeError(f"ctx.lookup under shard_map needs a table of dims vocab and embed; {how}", hint)
        columns = table.value
        for axis in axes:
            token_BT = jax.lax.all_gather(token_BT, axis, axis=0, tiled=True)
        words = columns.shape[-dims]
        place_BT = token_BT - self.first("vocab", words)
        row_BTE = rows_of(columns, jnp.clip(place_BT, 0, words - 1), stacked=stacked)
        here_BT1 = jnp.expand_dims((place_BT >= 0) & (place_BT < words), tuple(range(token_BT.ndim, row_BTE.ndim)))
        row_BTE = jnp.where(here_BT1, row_BTE, 0).astype(table.dtype or row_BTE.dtype)
        if not axes:
            return row_BTE
        inside = row_BTE.shape[2:]  # ([layers,] columns), sent side by side
        row_BTE = row_BTE.reshape(*row_BTE.shape[:2], -1)
        for axis in reversed(axes):
            row_BTE = jax.lax.all_to_all(row_BTE, axis, split_axis=0, concat_axis=2, tiled=True)
        row_BTE = row_BTE.reshape(*row_BTE.shape[:2], -1, *inside)  # (B, T, device, [layers,] columns)
        return jnp.moveaxis(row_BTE, 2, -2).reshape(*row_BTE.shape[:2], *inside[:-1], -1)

    def places(self, length: int) -> jax.Array:
        parts = self.layout.sizes[SEQUENCE]
        if parts == 1:
            return jnp.arange(length, dtype=jnp.int32)
        return zigzag_tokens(jax.lax.axis_index(SEQUENCE), parts, length)

    def _token_parts(self) -> tuple[str, ...]:
        """The axis that splits `tokens` further than `length`: tensor, if it has more than one device."""
        return self.layout.axes("kept")

    def share(self, x_BT: jax.Array) -> jax.Array:
        axes = self._token_parts()
        if not axes:
            return x_BT
        assert len(axes) == 1
        size = x_BT.shape[1] // self.layout.sizes[axes[0]]
        return jax.lax.dynamic_slice_in_dim(vary(x_BT, axes), jax.lax.axis_index(axes) * size, size, axis=1)

    def collect(self, x_BTE: jax.Array) -> jax.Array:
        axes = self._token_parts()
        return jax.lax.all_gather(x_BTE, axes, axis=1, tiled=True) if axes else x_BTE

    def scatter(self, x_BTE: jax.Array, dim: str) -> jax.Array:
        axes = self._token_parts()
        if not axes or not self._work_axes(dim):  # x is not a partial sum
            return self.share(x_BTE)
        summed = jax.lax.psum_scatter(x_BTE, axes, scatter_dimension=1, tiled=True)
        # if saved, neither the product nor the reduce-scatter is repeated
        return checkpoint_name(summed, {"heads": "out", "hidden": "down"}.get(dim, PRODUCT))

    def whole_row(self, x_BT: jax.Array) -> jax.Array:
        x_BT, parts = self.collect(x_BT), self.layout.sizes[SEQUENCE]
        if parts == 1:
            return x_BT
        x_BT = jax.lax.all_gather(x_BT, SEQUENCE, axis=1, tiled=True)
        # gathered in zigzag order; argsort of that order is its inverse
        return x_BT[:, np.argsort(zigzag_positions(x_BT.shape[1], parts))]

    def part_of_row(self, x_BT: jax.Array) -> jax.Array:
        return self.share(x_BT[:, self.places(x_BT.shape[1] // self.layout.sizes[SEQUENCE])])

    def attend(
        self,
        q_BTHD: jax.Array,
        k_BTGD: jax.Array,
        v_BTGD: jax.Array,
        spec: AttentionSpec,
        document_BT: jax.Array | None,
        sink_H: jax.Array | None = None,
    ) -> jax.Array:
        parts, heads = self.layout.sizes[SEQUENCE], q_BTHD.shape[2]
        k_BTGD, v_BTGD = (self._groups_of_own_heads(x_BTGD, heads) for x_BTGD in (k_BTGD, v_BTGD))
        if parts == 1:
            return local_attention(
                self.layout.platform, q_BTHD, k_BTGD, v_BTGD, spec=spec, document_BT=document_BT, sink_H=sink_H
            )
        if not spec.causal:
            message = f"mesh.sequence = {parts} supports causal attention only; this model's attention is not causal"
            raise RecipeError(message, "set mesh.sequence: 1")
        # the zigzag order has two chunks for each part
        pairs = pair_attention(self.layout.platform, spec, q_BTHD.shape[1] // 2, q_BTHD.shape[3])
        sink_H = None if sink_H is None else vary(sink_H, axes_of(q_BTHD))
        return ring_attention(q_BTHD, k_BTGD, v_BTGD, document_BT, sink_H, pairs=pairs, axis=SEQUENCE, parts=parts)

    def _groups_of_own_heads(self, x_BTGD: jax.Array, heads: int) -> jax.Array:
        """Of keys or values with all groups on every device, the groups that this device's `heads` query heads use."""
        axes = self._work_axes("heads")
        if not axes or self._work_axes("kv_heads"):
            return x_BTGD
        each = heads * self.parts("heads") // x_BTGD.shape[2]  # query heads per group
        first, x_BTGD = self.first("heads", heads), vary(x_BTGD, axes)
        if heads % each == 0 or each % heads == 0:  # whole groups, or a part of one
            return jax.lax.dynamic_slice_in_dim(x_BTGD, first // each, max(1, heads // each), axis=2)
        # else a group is shared with the next device: repeat the group of each query head, one group per head
        return jnp.take(x_BTGD, (first + jnp.arange(heads)) // each, axis=2)

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        def gathering(block: Block) -> Block:
            def whole(layer: Tree, x: jax.Array, shared: Tree, ctx: Any) -> tuple[jax.Array, Tree]:
                return block(how.but_tables(self.gather, layer), self._row_major(x), shared, ctx)

            return whole

        def layers(x: jax.Array, shared: Tree) -> tuple[jax.Array, Tree]:
            # FSDP: even without remat, the backward pass gathers parameters again instead of saving them
            regathers = how.remat == "none" and self.layout.parts("embed") > 1
            policy = replace(how, remat=regather(FSDP_AXES)) if regathers else how
            gathers = {block: gathering(block) for block in blocks}  # equal blocks stay one
            ready = how.looked_up(params, shared, self)
            return scan_layers([gathers[block] for block in blocks], ready, x, shared=shared, how=policy, ctx=self)

        stacks = params.values() if how.groups else [params]
        stages, own = self.layout.sizes[PIPELINE], sum(len(jax.tree.leaves(stack)[0]) for stack in stacks)
        if stages > 1 and own % len(blocks):
            raise RecipeError(
                f"mesh.pipeline = {stages} gives each stage {own} layers, not a multiple of {len(blocks)}",
                f"layers come in groups of {len(blocks)}: choose a mesh.pipeline that gives each stage full groups",
            )
        if stages == 1:
            return layers(x, shared)
        return pipelined(layers, x, shared, axis=PIPELINE, stages=stages, microbatches=self.microbatches)

    def _row_major(self, x: jax.Array) -> jax.Array:
        """x, kept in row-major order on TPUs, where XLA may else save a layer's input transposed and copy it back."""
        return with_layout_constraint(x, ArrayLayout(tuple(range(x.ndim)))) if self.layout.platform == "tpu" else x

    def dispatch(self, tokens: Routing, experts: ExpertWeights) -> jax.Array:
        parts = self.layout.sizes[EXPERT]
        params = jax.tree.map(lambda p: varied(p, axes_of(tokens.x)), experts.params)
        experts = replace(experts, params=params, product=partial(grouped_product, self.layout.platform))
        return grouped(tokens, experts) if parts == 1 else exchanged(tokens, experts, EXPERT, parts)
