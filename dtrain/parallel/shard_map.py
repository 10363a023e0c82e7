"""The `shard_map` engine: every collective is explicit, over every axis of the mesh.

Inside the region, the loss is the sum over this device's own tokens. A parameter that is replicated over an axis of
examples or tokens is marked as varying over it: then its gradient stays local while microbatches accumulate, and one
psum at the end sums it over the devices. Parameters that `fsdp` splits are all-gathered layer by layer, and the
gradient of that gather is a reduce-scatter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.core.chips import Chip
from dtrain.core.errors import RecipeError
from dtrain.data.batch import Batch
from dtrain.models.nn.model import Loss
from dtrain.models.nn.param import Tree, trained
from dtrain.models.nn.vma import axes_of, vary
from dtrain.parallel.compiler_options import Overlap
from dtrain.parallel.engine import Compiler, Grads, LossFn, Outputs, OutputsFn, Sums, accumulate, flow
from dtrain.parallel.gather import summed, wrap
from dtrain.parallel.manual import ShardMapContext
from dtrain.parallel.mesh import FSDP, FSDP_AXES, RULES
from dtrain.parallel.rules import Layout, split_axes


@dataclass(frozen=True, kw_only=True)
class ShardMap(Compiler):
    """Every collective is explicit in dtrain's own code."""

    kind: Literal["shard_map"] = "shard_map"

    def automatic(self, chip: Chip) -> Overlap:
        return "sparsecore" if chip.sparse_offload else "kernels" if chip.dims == 3 else "none"

    def refusal(self, layout: Layout) -> str:
        if layout.rules["vocab"] and layout.axes("vocab") and set(layout.axes("vocab")) <= set(FSDP_AXES):
            return "shard_map splits an embedding over fsdp by columns only: mesh.rules.vocab: fsdp needs mesh.fsdp = 1"
        for dim, axes in layout.rules.items():
            if axes != RULES.get(dim) and not set(axes) <= set(FSDP_AXES):
                default = " and ".join(RULES.get(dim, ()))
                allowed = FSDP if set(RULES.get(dim, FSDP_AXES)) <= set(FSDP_AXES) else f"{default} or fsdp"
                return f"shard_map can split {dim} over {allowed} only; mesh.rules.{dim} is {' and '.join(axes)}"
        return ""

    def place(self, layout: Layout, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], NamedSharding]:
        return shape, layout.sharding(layout.input(name))

    def grads(self, layout: Layout, loss: LossFn, microbatches: int) -> Grads:
        specs, axes, declared = layout.specs(), layout.token_axes, layout.declared
        own_specs = trained(specs, declared)
        parts, inflight = flow(layout, microbatches)
        ctx = ShardMapContext(layout, inflight)

        def replicated_over(spec: PartitionSpec) -> tuple[str, ...]:
            """The axes of examples and tokens over which a parameter of this spec is replicated."""
            return tuple(axis for axis in axes if axis not in split_axes(spec))

        def local(params: Tree, batch: Batch) -> tuple[Loss, Tree]:
            params = jax.tree.map(lambda p, s: vary(p, replicated_over(s)), params, specs)

            def own(p: Tree, rows: Batch) -> Any:
                return loss(wrap(p, specs), rows, ctx)

            value, gradients = accumulate(own, params, batch, parts, declared)
            _refuse_shares(value, axes)
            gradients = jax.tree.map(lambda g, s: summed(g, replicated_over(s)), gradients, own_specs)
            return jax.tree.map(lambda x: summed(x, axes), value), gradients

        return self._over(layout, local, (PartitionSpec(), own_specs))

    def sums(self, layout: Layout, loss: LossFn, microbatches: int) -> Sums:
        specs, axes = layout.specs(), layout.token_axes
        ctx = ShardMapContext(layout, flow(layout, microbatches)[1])

        def local(params: Tree, batch: Batch) -> Loss:
            params = jax.tree.map(lambda p: vary(p, axes), params)
            value = loss(wrap(params, specs), batch, ctx)
            _refuse_shares(value, axes)
            return jax.tree.map(lambda x: summed(x, axes), value)

        return self._over(layout, local, PartitionSpec())

    def rows(self, layout: Layout, outputs: OutputsFn) -> Outputs:
        specs, axes, batch_axes = layout.specs(), layout.token_axes, layout.batch_axes
        ctx = ShardMapContext(layout)

        def local(params: Tree, batch: Batch) -> dict[str, jax.Array]:
            params = jax.tree.map(lambda p: vary(p, axes), params)
            values = outputs(wrap(params, specs), batch, ctx)
            _refuse_shares(values, batch_axes, "a prediction")
            return jax.tree.map(lambda x: vary(x, batch_axes), values)

        return self._over(layout, local, layout.spec(("batch",)))

    def _over(self, layout: Layout, local: Callable[..., Any], out: object) -> Callable[..., Any]:
        def over(params: Tree, batch: Batch) -> Any:
            inputs = {name: layout.input(name) for name in batch}
            region = jax.shard_map(
                local, mesh=layout.mesh, in_specs=(layout.specs(), inputs), out_specs=out, check_vma=True
            )
            return region(params, batch)

        return over

    def trace(
        self, layout: Layout, function: Callable[..., object], *args: Any, out: object, donate: bool
    ) -> jax.stages.Traced:
        return jax.jit(function, donate_argnums=(0,) if donate else (), out_shardings=out).trace(*args)


def _refuse_shares(value: Tree, axes: tuple[str, ...], what: str = "the loss") -> None:
    """Raise RecipeError if values vary between devices that have the same examples: a psum is missing."""
    rest = {axis for leaf in jax.tree.leaves(value) for axis in axes_of(leaf)} - set(axes)
    if rest:
        message = f"{what} differs between the devices of {min(rest)}, which have the same examples"
        raise RecipeError(message, "call ctx.reduce(x, dim) after a product that sums over a dim split by this axis")
