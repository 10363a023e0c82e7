"""The verbs as collectives: what each device says to the others when a model speaks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from dtrain.core.errors import RecipeError
from dtrain.models.nn.attention import AttentionSpec
from dtrain.models.nn.context import Block, Layers, scan_layers
from dtrain.models.nn.moe import ExpertWeights, Routing, grouped
from dtrain.models.nn.param import Tree
from dtrain.models.nn.remat import PRODUCT, regather
from dtrain.models.nn.vma import axes_of, varied, vary
from dtrain.parallel.experts import exchanged
from dtrain.parallel.gather import NotGathered, gathered, is_wrapped, summed
from dtrain.parallel.kernels import grouped_product, local_attention
from dtrain.parallel.mesh import MEMORY_AXES
from dtrain.parallel.pipeline import pipelined
from dtrain.parallel.ring import ring_attention, zigzag_tokens
from dtrain.parallel.rules import Layout, zigzag_positions


@dataclass(frozen=True)
class ShardMapContext:
    """The verbs of a region placed by hand."""

    layout: Layout
    microbatches: int = 1
    """Microbatches in a pipeline at once."""
    loss_dtype: str = "float32"

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        return x

    def gather(self, params: Tree) -> Tree:
        def whole(part: NotGathered) -> jax.Array:
            x, entries = part.value, enumerate(part.axes[len(part.axes) - part.value.ndim :])
            cuts = tuple((dim, axis) for dim, entry in entries for axis in reversed(self._savers(entry)))
            return gathered(x, cuts, part.dtype or str(x.dtype), str(x.dtype))

        return jax.tree.map(whole, params, is_leaf=is_wrapped)

    def _savers(self, entry: Any) -> tuple[str, ...]:
        """Of the axes that split a dim, those that do so only to save memory."""
        axes = entry if isinstance(entry, tuple) else (entry,)
        return tuple(axis for axis in axes if axis in MEMORY_AXES)

    def _shares(self, dim: str) -> tuple[str, ...]:
        """The axes along which each device has its own share of `dim`."""
        return tuple(axis for axis in self.layout.axes(dim) if axis not in MEMORY_AXES)

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        same = [axis for axis in self._shares(dim) if axis not in axes_of(x)]
        if same:  # a sum would count it once for each device
            message = f"ctx.reduce(x, {dim!r}): x is the same on every device of {same[0]}, not a share of a sum"
            raise RecipeError(message, f"call it only after a product over a dim named {dim}")
        return summed(x, self._shares(dim))

    def largest(self, x: jax.Array, dim: str) -> jax.Array:
        axes = tuple(axis for axis in self._shares(dim) if axis in axes_of(x))
        x = jax.lax.stop_gradient(x)
        return jax.lax.pmax(x, axes) if axes else x

    def parts(self, dim: str) -> int:
        return self.layout.shares(dim)

    def first(self, dim: str, size: int) -> jax.Array | int:
        axes = self._shares(dim)
        return jax.lax.axis_index(axes) * size if axes else 0

    def lookup(self, table: Tree, token_BT: jax.Array) -> jax.Array:
        """Where the table's rows are split to save memory, it is the tokens that travel, and the parts of
        rows that come back, not the table."""
        part, axes = table.value, self._savers(table.axes[-1])
        for axis in axes:
            token_BT = jax.lax.all_gather(token_BT, axis, axis=0, tiled=True)
        place_BT = token_BT - self.first("vocab", part.shape[0])
        here_BT1 = ((place_BT >= 0) & (place_BT < part.shape[0]))[..., None]
        row_BTE = jnp.where(here_BT1, part[jnp.clip(place_BT, 0, part.shape[0] - 1)], 0)
        row_BTE = row_BTE.astype(table.dtype or row_BTE.dtype)
        for axis in reversed(axes):
            row_BTE = jax.lax.all_to_all(row_BTE, axis, split_axis=0, concat_axis=2, tiled=True)
        return row_BTE

    def places(self, length: int) -> jax.Array:
        parts = self.layout.sizes["sequence"]
        if parts == 1:
            return jnp.arange(length, dtype=jnp.int32)
        return zigzag_tokens(jax.lax.axis_index("sequence"), parts, length)

    def _keepers(self) -> tuple[str, ...]:
        """The axes that split `tokens` further than `length`."""
        return self.layout.axes("kept")

    def share(self, x_BT: jax.Array) -> jax.Array:
        axes = self._keepers()
        if not axes:
            return x_BT
        assert len(axes) == 1
        size = x_BT.shape[1] // self.layout.sizes[axes[0]]
        return jax.lax.dynamic_slice_in_dim(vary(x_BT, axes), jax.lax.axis_index(axes) * size, size, axis=1)

    def collect(self, x_BTE: jax.Array) -> jax.Array:
        axes = self._keepers()
        return jax.lax.all_gather(x_BTE, axes, axis=1, tiled=True) if axes else x_BTE

    def scatter(self, x_BTE: jax.Array, dim: str) -> jax.Array:
        axes = self._keepers()
        if not axes or not self._shares(dim):
            return self.share(x_BTE)
        summed = jax.lax.psum_scatter(x_BTE, axes, scatter_dimension=1, tiled=True)
        return checkpoint_name(summed, PRODUCT)  # kept, it spares the product and its sum over devices

    def whole_row(self, x_BT: jax.Array) -> jax.Array:
        x_BT, parts = self.collect(x_BT), self.layout.sizes["sequence"]
        if parts == 1:
            return x_BT
        x_BT = jax.lax.all_gather(x_BT, "sequence", axis=1, tiled=True)
        return x_BT[:, np.argsort(zigzag_positions(x_BT.shape[1], parts))]

    def part_of_row(self, x_BT: jax.Array) -> jax.Array:
        return self.share(x_BT[:, self.places(x_BT.shape[1] // self.layout.sizes["sequence"])])

    def attend(
        self,
        q_BTHD: jax.Array,
        k_BTGD: jax.Array,
        v_BTGD: jax.Array,
        reach: AttentionSpec,
        document_BT: jax.Array | None,
    ) -> jax.Array:
        parts, heads = self.layout.sizes["sequence"], q_BTHD.shape[2]
        k_BTGD, v_BTGD = (self._groups_of_own_heads(x_BTGD, heads) for x_BTGD in (k_BTGD, v_BTGD))
        if parts == 1:
            return local_attention(self.layout.platform, q_BTHD, k_BTGD, v_BTGD, reach, document_BT)
        if not reach.causal:
            message = f"mesh.sequence = {parts} serves causal attention only; this model's attention is not causal"
            raise RecipeError(message, "use sequence: 1")
        return ring_attention(q_BTHD, k_BTGD, v_BTGD, document_BT, reach, "sequence", parts)

    def _groups_of_own_heads(self, x_BTGD: jax.Array, heads: int) -> jax.Array:
        """Of keys or values that every device has, the groups of this device's share of `heads` query heads."""
        axes = self._shares("heads")
        if not axes or self._shares("kv_heads"):
            return x_BTGD
        each = heads * self.parts("heads") // x_BTGD.shape[2]  # query heads of one group
        first, x_BTGD = self.first("heads", heads), vary(x_BTGD, axes)
        if heads % each == 0 or each % heads == 0:  # whole groups, or a part of one
            return jax.lax.dynamic_slice_in_dim(x_BTGD, first // each, max(1, heads // each), axis=2)
        return jnp.take(x_BTGD, (first + jnp.arange(heads)) // each, axis=2)

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        def gathering(block: Block) -> Block:
            return lambda layer, x, shared, ctx: block(self.gather(layer), x, shared, ctx)

        def layers(x: jax.Array, shared: Tree) -> tuple[jax.Array, Tree]:
            again = how.remat == "none" and self.layout.parts("embed") > 1
            kept = Layers(regather(MEMORY_AXES), how.unroll) if again else how
            return scan_layers([gathering(block) for block in blocks], params, x, shared, kept, self)

        stages, held = self.layout.sizes["pipeline"], len(jax.tree.leaves(params)[0])
        if held % len(blocks):
            raise RecipeError(
                f"mesh.pipeline = {stages} leaves {held} layers to a stage; they come in groups of {len(blocks)}",
                "take a pipeline whose stages hold whole groups",
            )
        if stages == 1:
            return layers(x, shared)
        return pipelined(layers, x, shared, "pipeline", stages, self.microbatches)

    def dispatch(self, tokens: Routing, experts: ExpertWeights) -> jax.Array:
        parts = self.layout.sizes["expert"]
        params = jax.tree.map(lambda p: varied(p, axes_of(tokens.x)), experts.params)
        experts = replace(experts, params=params, product=partial(grouped_product, self.layout.platform))
        return grouped(tokens, experts) if parts == 1 else exchanged(tokens, experts, "expert", parts)
