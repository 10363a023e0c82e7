"""The `jit` engine: shardings are declared, and the compiler inserts the collectives.

Computations that the compiler cannot split, because their order of communication matters (ring attention, a pipeline,
the all-to-all of experts), because they are opaque kernels (splash attention), or because the compiler would sum a full
gradient (embeddings split by columns), run in `shard_map` regions inside.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.core.chips import Chip
from dtrain.core.errors import Problem
from dtrain.data.batch import Batch
from dtrain.models.nn.attention import AttentionSpec
from dtrain.models.nn.context import Block, Layers
from dtrain.models.nn.examples import ExampleVerbs
from dtrain.models.nn.model import Loss
from dtrain.models.nn.moe import ExpertWeights, Routing, grouped
from dtrain.models.nn.param import Tree, trained
from dtrain.models.nn.single_device import scan_layers
from dtrain.models.nn.vma import varied
from dtrain.parallel.compiler_options import ALL_REDUCE, SPARSECORE, WITH_KERNELS, Overlap
from dtrain.parallel.engine import Compiler, Grads, LossFn, Outputs, OutputsFn, Sums, accumulate, flow
from dtrain.parallel.gather import (
    gathered_in,
    is_wrapped,
    looked_up,
    memory_left_out,
    specs_of,
    summed,
    unwrapped,
    wrap,
)
from dtrain.parallel.kernels import grouped_product, local_attention
from dtrain.parallel.manual import ShardMapContext
from dtrain.parallel.mesh import FSDP_AXES, PIPELINE, RULES, SEQUENCE, TENSOR
from dtrain.parallel.rules import Layout, zigzag_positions

MEGACORE = ("v4", "v5p")
"""Chips whose two cores are one device."""


@dataclass(frozen=True, kw_only=True)
class Jit(Compiler):
    """The compiler inserts every collective."""

    kind: Literal["jit"] = "jit"

    @property
    def explicit(self) -> bool:
        return False

    def automatic(self, chip: Chip) -> Overlap:
        return "sparsecore" if chip.sparse_offload else "none"

    def left_out(self, chip: Chip | None, *, experts: bool) -> frozenset[str]:
        """libtpu 0.0.42 ends the process with kernels beside collectives ("BarrierMegacore in primary or secondary
        region") on chips whose two cores are one device, and with any of the options for experts on TPU7x
        ("async_collective_start_emitter: smem_state_shape.dimensions(0) == num_states"); all-reduces of experts do not
        compile for the SparseCores."""
        if experts:
            return frozenset(SPARSECORE if chip and chip.name == "tpu7x" else (WITH_KERNELS, ALL_REDUCE))
        return frozenset([WITH_KERNELS] if chip and chip.name in MEGACORE else [])

    def refusal(self, layout: Layout) -> str:
        """`shard_map` regions split over `tensor` only the dims of the default rules."""
        own = {dim for dim in layout.rules if dim not in RULES and TENSOR in layout.axes(dim)}
        for param in jax.tree.leaves(layout.declared):
            stacked = "layer" if layout.parts("layer") > 1 else "experts"
            split = own & set(param.names)
            if split and stacked in param.names:
                return (
                    f"{min(split)} is a dim of stacked {stacked} parameters, which mesh.rules can split over fsdp only"
                )
        return ""

    def problems(self, recipe: Any) -> Iterator[Problem]:
        yield from super().problems(recipe)
        if self.overlap == "kernels" and recipe.model.structure.mixture:
            message = "under jit, the compiler of TPUs ends the process with collectives beside kernels of experts"
            yield "engine.overlap", message, "use products, or engine: {kind: shard_map, overlap: kernels}"

    def place(self, layout: Layout, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], NamedSharding]:
        return shape, layout.sharding(layout.input(name))

    def grads(self, layout: Layout, loss: LossFn, microbatches: int) -> Grads:
        specs, declared, (parts, inflight) = layout.specs(), layout.declared, flow(layout, microbatches)
        ctx = JitContext(layout, inflight)

        def grads(params: Tree, batch: Batch) -> tuple[Loss, Tree]:
            def own(p: Tree, rows: Batch) -> Loss:
                return loss(wrap(p, specs), rows, ctx)

            value, gradients = accumulate(own, params, batch, parts, declared)
            constrain = jax.lax.with_sharding_constraint
            own_specs = trained(specs, declared)
            return value, jax.tree.map(lambda g, s: constrain(g, layout.sharding(s)), gradients, own_specs)

        return grads

    def sums(self, layout: Layout, loss: LossFn, microbatches: int) -> Sums:
        ctx = JitContext(layout, flow(layout, microbatches)[1])
        return lambda params, batch: loss(wrap(params, layout.specs()), batch, ctx)

    def rows(self, layout: Layout, outputs: OutputsFn) -> Outputs:
        ctx = JitContext(layout)
        return lambda params, batch: outputs(wrap(params, layout.specs()), batch, ctx)

    def trace(
        self, layout: Layout, function: Callable[..., object], *args: Any, out: object, donate: bool
    ) -> jax.stages.Traced:
        return jax.jit(function, donate_argnums=(0,) if donate else (), out_shardings=out).trace(*args)


@dataclass(frozen=True)
class JitContext(ExampleVerbs):
    """The verbs as sharding constraints, which guide the compiler."""

    layout: Layout
    microbatches: int = 1

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        split = [dim if dim == "batch" or not self._saves_memory(dim) else None for dim in dims]
        split = [None, *split[1:]] if x.shape[0] == 1 else split  # one row that serves the full batch
        return jax.lax.with_sharding_constraint(x, self.layout.sharding(self.layout.spec(split)))

    def _saves_memory(self, dim: str | None) -> bool:
        """Whether this dim is split over fsdp: in parameters, to save memory, but not in activations."""
        return bool(set(self.layout.axes(dim)) & set(FSDP_AXES))

    def gather(self, params: Tree) -> Tree:
        def one(part: Any) -> Any:
            if not is_wrapped(part):
                return part
            x = part.value.astype(part.dtype or part.value.dtype)
            entries = (*[None] * x.ndim, *part.axes)[-x.ndim :] if x.ndim else ()
            whole, own = PartitionSpec(*map(memory_left_out, entries)), PartitionSpec(*entries)
            if whole != own:
                x = _gathered(x, self.layout.sharding(whole), self.layout.sharding(own))
            return part.completed(x, one)

        return jax.tree.map(one, params, is_leaf=is_wrapped)

    def _gathering(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """The blocks, with the codes of their quantised matrices gathered; equal blocks stay one."""

        def one(block: Block) -> Block:
            return lambda layer, x, shared, ctx: block(gathered_in(layer, self.layout.sharding), x, shared, ctx)

        made = {block: one(block) for block in dict.fromkeys(blocks)}
        return [made[block] for block in blocks]

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        return x

    def largest(self, x: jax.Array, dim: str) -> jax.Array:
        return jax.lax.stop_gradient(x)

    def first(self, dim: str, size: int) -> jax.Array | int:
        return 0

    def parts(self, dim: str) -> int:
        return self.layout.shares(dim)

    def lookup(self, table: Tree, token_BT: jax.Array, *, stacked: bool = False) -> jax.Array:
        columns_alone = self._split_by_columns(table, 3 if stacked else 2)
        if not columns_alone or token_BT.ndim != 2 or len(token_BT) % self.layout.parts("batch"):
            return looked_up(table, token_BT, stacked=stacked)
        # With data and fsdp, the compiler would sum a gradient of the full table, where each device needs its columns.
        inner, axes, spec = ShardMapContext(self.layout), self.layout.token_axes, self.layout.spec

        def columns(value: jax.Array, token_BT: jax.Array) -> jax.Array:
            return inner.lookup(replace(table, value=varied(value, axes)), token_BT, stacked=stacked)

        rows = spec(("batch", "length"))
        own = PartitionSpec(*table.axes[-table.value.ndim :])  # the table of one layer has no dim of layers here
        return self._shard_map(columns, (own, rows), rows)(table.value, token_BT)

    @staticmethod
    def _split_by_columns(table: Tree, dims: int) -> bool:
        """Whether the table is ([layers,] vocab, embed), and split over fsdp along its columns alone."""
        if not is_wrapped(table) or table.low_rank is not None or table.value.ndim != dims or table.axes[-2]:
            return False
        axes = table.axes[-1] if isinstance(table.axes[-1], tuple) else (table.axes[-1],)
        return set(axes) <= set(FSDP_AXES)

    def places(self, length: int) -> jax.Array:
        return jnp.asarray(zigzag_positions(length, max(1, self.layout.sizes[SEQUENCE])), jnp.int32)

    def share(self, x_BT: jax.Array) -> jax.Array:
        return self.shard(x_BT, "batch", "tokens", *[None] * (x_BT.ndim - 2))

    def collect(self, x_BTE: jax.Array) -> jax.Array:
        return self.shard(x_BTE, "batch", "length", None)

    def scatter(self, x_BTE: jax.Array, dim: str) -> jax.Array:
        return self.shard(x_BTE, "batch", "tokens", None)

    def whole_row(self, x_BT: jax.Array) -> jax.Array:
        # tokens are in zigzag order: argsort of that order is its inverse
        order = np.argsort(zigzag_positions(x_BT.shape[1], self.layout.sizes[SEQUENCE]))
        return self.shard(x_BT[:, order], "batch", *[None] * (x_BT.ndim - 1))

    def part_of_row(self, x_BT: jax.Array) -> jax.Array:
        return self.share(x_BT[:, zigzag_positions(x_BT.shape[1], self.layout.sizes[SEQUENCE])])

    def _shard_map(self, function: Callable[..., Any], dims: Sequence[object], out: object) -> Callable[..., Any]:
        """`function` as a `shard_map` region; `dims` has the PartitionSpecs of each argument, `out` of the result."""
        return jax.shard_map(function, mesh=self.layout.mesh, in_specs=tuple(dims), out_specs=out, check_vma=True)

    def attend(
        self,
        q_BTHD: jax.Array,
        k_BTGD: jax.Array,
        v_BTGD: jax.Array,
        spec: AttentionSpec,
        document_BT: jax.Array | None,
        sink_H: jax.Array | None = None,
    ) -> jax.Array:
        platform, partition = self.layout.platform, self.layout.spec
        if self.layout.sizes[SEQUENCE] == 1 and platform == "cpu":
            return local_attention(platform, q_BTHD, k_BTGD, v_BTGD, spec=spec, document_BT=document_BT, sink_H=sink_H)
        q, kv = partition(("batch", "length", "heads")), partition(("batch", "length", "kv_heads"))
        inner = ShardMapContext(self.layout)
        more = {"document_BT": (document_BT, ("batch", "length")), "sink_H": (sink_H, ("heads",))}
        more = {name: (array, partition(dims)) for name, (array, dims) in more.items() if array is not None}
        region = self._shard_map(
            lambda q, k, v, *rest: inner.attend(q, k, v, spec, **{"document_BT": None, **dict(zip(more, rest))}),
            (q, kv, kv, *[dims for _, dims in more.values()]),
            q,
        )
        return region(q_BTHD, k_BTGD, v_BTGD, *[array for array, _ in more.values()])

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        if self.layout.sizes[PIPELINE] == 1:
            # not gathered here, which would gather all layers at once: the compiler does it for each layer
            params = how.looked_up(params, shared, self)
            stacks = params if how.groups else {"": params}
            stacks = {name: how.but_tables(unwrapped, stack) for name, stack in stacks.items()}
            stacks = stacks if how.groups else stacks[""]
            return scan_layers(self._gathering(blocks), stacks, x, shared=shared, how=how, ctx=self)
        inner, axes = (
            ShardMapContext(self.layout, self.microbatches, loss_dtype=self.loss_dtype),
            self.layout.token_axes,
        )

        def layers(params: Tree, x: jax.Array, shared: Tree) -> tuple[jax.Array, Tree]:
            out, sums = inner.stack(blocks, params, x, shared, how)
            return out, jax.tree.map(lambda s: summed(s, axes), sums)

        def rows(leaf: jax.Array) -> PartitionSpec:
            whole = leaf.ndim > 1 and leaf.shape[1] == x.shape[1]
            return self.layout.spec(("batch" if leaf.shape[0] == x.shape[0] else None, "length" if whole else None))

        tokens = self.layout.spec(("batch", "tokens"))
        dims = (specs_of(params), tokens, jax.tree.map(rows, shared))
        region = self._shard_map(layers, dims, (tokens, PartitionSpec()))
        return region(params, x, shared)  # cast inside, so that gradients are summed in the dtype of the parameters

    def dispatch(self, tokens: Routing, experts: ExpertWeights) -> jax.Array:
        assert self.layout.mesh is not None
        if self.layout.mesh.size == 1 and self.layout.platform == "cpu":
            return grouped(tokens, replace(experts, product=partial(grouped_product, "cpu")))
        inner, rows = ShardMapContext(self.layout), self.layout.spec(("batch", "length"))
        axes = self.layout.token_axes

        def exchange(tokens: Routing, params: Tree) -> jax.Array:
            params = jax.tree.map(lambda p: varied(p, axes), params)
            return inner.reduce(inner.dispatch(tokens, replace(experts, params=params)), "hidden")

        # the region's inputs are not split over fsdp: the compiler all-gathers the experts before it
        used = jax.tree.map(lambda names: self._without_memory_axes(names.split()), experts.dims)
        return self._shard_map(exchange, (rows, used), rows)(tokens, experts.params)

    def _without_memory_axes(self, names: Sequence[str]) -> PartitionSpec:
        axes_of_dims = [tuple(axis for axis in self.layout.axes(dim) if axis not in FSDP_AXES) for dim in names]
        return PartitionSpec(*(axes or None for axes in axes_of_dims))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, whole: NamedSharding, own: NamedSharding) -> jax.Array:
    """A parameter that is split like `own`, split like `whole`; its gradient is split like `own` again.

    Left to itself, the compiler may keep a small parameter split and gather the examples of the batch instead.
    """
    del own
    return jax.lax.with_sharding_constraint(x, whole)


_gathered.defvjp(
    lambda x, whole, own: (_gathered(x, whole, own), None),
    lambda _, own, __, gradient: (jax.lax.with_sharding_constraint(gradient, own),),
)
