"""The engine in which every collective is placed by hand, over every axis of the mesh.

Inside, the loss is this device's own sum. Parameters that a token axis does not split are marked
as varying over it, so that their gradients stay local while microbatches add up and are summed
over the devices once, at the end. Parameters that `fsdp` splits are gathered layer by layer, and
the gradient of the gather is the reduce-scatter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.core.errors import RecipeError
from dtrain.data.batch import Batch
from dtrain.models.nn.model import Loss
from dtrain.models.nn.param import Tree
from dtrain.models.nn.vma import axes_of, vary
from dtrain.parallel.engine import Compiler, Grads, LossFn, Sums, accumulate, flow
from dtrain.parallel.gather import summed, wrap
from dtrain.parallel.manual import ShardMapContext
from dtrain.parallel.mesh import MEMORY_AXES, RULES
from dtrain.parallel.rules import Layout, split_axes


@dataclass(frozen=True, kw_only=True)
class ShardMap(Compiler):
    """Every collective is written out in dtrain's own code."""

    kind: Literal["shard_map"] = "shard_map"

    def refusal(self, layout: Layout, processes: int) -> str:
        if layout.rules["vocab"] and layout.axes("vocab") and set(layout.axes("vocab")) <= set(MEMORY_AXES):
            return "shard_map gathers an embedding by its columns: mesh.rules.vocab: fsdp serves only where fsdp is 1"
        for dim, axes in layout.rules.items():
            if axes != RULES.get(dim) and not set(axes) <= set(MEMORY_AXES):
                usual = " and ".join(RULES.get(dim, ()))
                known = "fsdp" if set(RULES.get(dim, MEMORY_AXES)) <= set(MEMORY_AXES) else f"{usual} or fsdp"
                return f"shard_map splits {dim} over {known} only; mesh.rules asks for {' and '.join(axes)}"
        return ""

    def place(self, layout: Layout, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], NamedSharding]:
        return shape, layout.sharding(layout.input(name))

    def grads(self, layout: Layout, loss: LossFn, microbatches: int) -> Grads:
        specs, axes = layout.specs(), layout.token_axes
        parts, inflight = flow(layout, microbatches)
        ctx = ShardMapContext(layout, inflight)

        def missing(spec: PartitionSpec) -> tuple[str, ...]:
            return tuple(axis for axis in axes if axis not in split_axes(spec))

        def local(params: Tree, batch: Batch) -> tuple[Loss, Tree]:
            params = jax.tree.map(lambda p, s: vary(p, missing(s)), params, specs)
            own = lambda p, rows: loss(wrap(p, specs), rows, ctx)  # noqa: E731
            found, gradients = accumulate(own, params, batch, parts)
            _refuse_shares(found, axes)
            gradients = jax.tree.map(lambda g, s: summed(g, missing(s)), gradients, specs)
            return jax.tree.map(lambda x: summed(x, axes), found), gradients

        return self._over(layout, local, (PartitionSpec(), specs))

    def sums(self, layout: Layout, loss: LossFn, microbatches: int) -> Sums:
        specs, axes = layout.specs(), layout.token_axes
        ctx = ShardMapContext(layout, flow(layout, microbatches)[1])

        def local(params: Tree, batch: Batch) -> Loss:
            params = jax.tree.map(lambda p: vary(p, axes), params)
            found = loss(wrap(params, specs), batch, ctx)
            _refuse_shares(found, axes)
            return jax.tree.map(lambda x: summed(x, axes), found)

        return self._over(layout, local, PartitionSpec())

    def _over(self, layout: Layout, local: Callable[..., Any], out: Any) -> Callable[..., Any]:
        def over(params: Tree, batch: Batch) -> Any:
            inputs = {name: layout.input(name) for name in batch}
            placed = jax.shard_map(
                local, mesh=layout.mesh, in_specs=(layout.specs(), inputs), out_specs=out, check_vma=True
            )
            return placed(params, batch)

        return over

    def trace(
        self, layout: Layout, function: Callable[..., Any], *args: Any, out: Any, donate: bool
    ) -> jax.stages.Traced:
        return jax.jit(function, donate_argnums=(0,) if donate else (), out_shardings=out).trace(*args)


def _refuse_shares(found: Loss, axes: tuple[str, ...]) -> None:
    """RecipeError where the loss still differs between devices that hold the same examples."""
    rest = {axis for leaf in jax.tree.leaves(found) for axis in axes_of(leaf)} - set(axes)
    if rest:
        message = f"the loss differs between the devices of {min(rest)}, which have the same examples"
        raise RecipeError(message, "call ctx.reduce(x, dim) after a product over a dim that this axis splits")
