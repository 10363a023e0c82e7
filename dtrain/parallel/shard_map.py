"""The engine in which every collective is placed by hand, over every axis of the mesh.

Inside, the loss is this device's own sum. Parameters that a batch axis does not split are marked
as varying over it, so that their gradients stay local while microbatches add up and are summed
over the devices once, at the end. Parameters that `fsdp` splits are gathered layer by layer, and
the gradient of the gather is the reduce-scatter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.batch import Batch
from dtrain.context import Block, dense_attention, scan_layers
from dtrain.model import Loss
from dtrain.parallel.engine import Grads, LossFn, Sums, accumulate
from dtrain.parallel.mesh import MEMORY_AXES
from dtrain.parallel.rules import Layout, split_axes
from dtrain.params import Tree


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """Every collective is written out in dtrain's own code."""

    kind: Literal["shard_map"] = "shard_map"

    def refusal(self, layout: Layout, processes: int) -> str:
        return ""

    def place(self, layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[int, ...], NamedSharding]:
        return shape, layout.sharding(layout.spec(("batch",)))

    def grads(self, layout: Layout, loss: LossFn, microbatches: int) -> Grads:
        specs, ctx, axes = layout.specs(), Manual(layout), layout.batch_axes

        def missing(spec: PartitionSpec) -> tuple[str, ...]:
            return tuple(axis for axis in axes if axis not in split_axes(spec))

        def local(params: Tree, batch: Batch) -> tuple[Loss, Tree]:
            params = jax.tree.map(lambda p, s: _vary(p, missing(s)), params, specs)
            own = lambda p, rows: loss(_wrap(p, specs), rows, ctx)  # noqa: E731
            found, gradients = accumulate(own, params, batch, microbatches)
            gradients = jax.tree.map(lambda g, s: _sum(g, missing(s)), gradients, specs)
            return jax.tree.map(lambda x: _sum(x, axes), found), gradients

        return self._over(layout, local, (PartitionSpec(), specs))

    def sums(self, layout: Layout, loss: LossFn) -> Sums:
        specs, ctx, axes = layout.specs(), Manual(layout), layout.batch_axes

        def local(params: Tree, batch: Batch) -> Loss:
            return jax.tree.map(lambda x: _sum(x, axes), loss(_wrap(params, specs), batch, ctx))

        return self._over(layout, local, PartitionSpec())

    def _over(self, layout: Layout, local: Callable[..., Any], out: Any) -> Callable[..., Any]:
        return jax.shard_map(
            local, mesh=layout.mesh, in_specs=(layout.specs(), layout.spec(("batch",))), out_specs=out, check_vma=True
        )

    def trace(
        self, layout: Layout, function: Callable[..., Any], *args: Any, out: Any, donate: bool
    ) -> jax.stages.Traced:
        return jax.jit(function, donate_argnums=(0,) if donate else (), out_shardings=out).trace(*args)


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["axes"])
@dataclass(frozen=True)
class NotGathered:
    """This device's part of a parameter; `ctx.gather` turns it into an array.

    `axes` holds what splits each dim. A scan over layers takes the leading dim away, so the
    axes are matched with the value's dims from the last one.
    """

    value: jax.Array
    axes: tuple[Any, ...]


@dataclass(frozen=True)
class Manual:
    """The verbs as collectives."""

    layout: Layout
    loss_dtype: str = "float32"

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        return x

    def gather(self, params: Tree) -> Tree:
        def whole(part: NotGathered) -> jax.Array:
            x = part.value
            for dim, axis in enumerate(part.axes[len(part.axes) - x.ndim :]):
                x = jax.lax.all_gather(x, axis, axis=dim, tiled=True) if axis in MEMORY_AXES else x
            return x

        return jax.tree.map(whole, params, is_leaf=lambda leaf: isinstance(leaf, NotGathered))

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        return _sum(x, tuple(axis for axis in self.layout.axes(dim) if axis not in MEMORY_AXES))

    def attend(self, q_BTHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array) -> jax.Array:
        return dense_attention(q_BTHD, k_BTHD, v_BTHD)

    def stack(self, block: Block, params: Tree, x: jax.Array) -> jax.Array:
        return scan_layers(lambda layer, carry: block(self.gather(layer), carry), params, x)


def _wrap(params: Tree, specs: Tree) -> Tree:
    def part(value: jax.Array, spec: PartitionSpec) -> NotGathered:
        return NotGathered(value, (*spec, *[None] * (value.ndim - len(spec))))

    return jax.tree.map(part, params, specs)


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


def _vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.pcast(x, axes, to="varying") if axes else x
