"""The `pmap` engine: every device computes the full step on its own examples, and gradients are summed by psum."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtrain.core.errors import Problem
from dtrain.data.batch import Batch
from dtrain.models.nn.context import Block, Layers
from dtrain.models.nn.model import Loss
from dtrain.models.nn.moe import ExpertWeights, Routing, grouped
from dtrain.models.nn.param import Tree
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.parallel.engine import Compiler, Grads, LossFn, Outputs, OutputsFn, Replicas, Sums, Traced, accumulate
from dtrain.parallel.gather import looked_up, unwrapped, wrap
from dtrain.parallel.kernels import grouped_product
from dtrain.parallel.mesh import DATA, mesh_sizes
from dtrain.parallel.rules import Layout


@dataclass(frozen=True)
class PmapContext(SingleDeviceContext):
    """The verbs on one of several replicas: only examples are split; parameters are cast to their compute dtype."""

    platform: str = ""

    @property
    def example_axes(self) -> tuple[str, ...]:
        return (DATA,)

    def dispatch(self, tokens: Routing, experts: ExpertWeights) -> jax.Array:
        return grouped(tokens, replace(experts, product=partial(grouped_product, self.platform)))

    def gather(self, params: Tree) -> Tree:
        return unwrapped(params)

    def lookup(self, table: Tree, token_BT: jax.Array, *, stacked: bool = False) -> jax.Array:
        return looked_up(table, token_BT, stacked=stacked)

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        return super().stack(blocks, unwrapped(params), x, shared, how)


@dataclass(frozen=True, kw_only=True)
class Pmap(Compiler):
    """Data parallelism by `jax.pmap`: parameters are replicated; only the data axis."""

    kind: Literal["pmap"] = "pmap"

    def arranged(self, mesh: Mesh) -> Mesh:
        """Devices of one process are adjacent along the axis, as `jax.pmap` needs it."""
        devices = sorted(mesh.devices.flat, key=lambda device: device.process_index)
        return Mesh(np.reshape(np.array(devices, object), mesh.devices.shape), mesh.axis_names, mesh.axis_types)

    def refusal(self, layout: Layout) -> str:
        others = [f"{axis} = {size}" for axis, size in mesh_sizes(layout.sizes).items() if axis != DATA and size > 1]
        if others:
            return f"pmap replicates the parameters and splits only the data axis; the mesh has {', '.join(others)}"
        if self.steps_per_call > 1:
            return f"pmap runs one step per call; steps_per_call is {self.steps_per_call}"
        return ""

    def problems(self, recipe: Any) -> Iterator[Problem]:
        yield from super().problems(recipe)
        if recipe.precision.reduce == "compute":
            message = "pmap reduces gradients in the type of the parameters, float32"
            yield "precision.reduce", message, "leave it out, or use engine: shard_map or jit"

    def place(self, layout: Layout, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], NamedSharding]:
        devices = layout.sizes[DATA]
        return (devices, shape[0] // devices, *shape[1:]), layout.sharding(PartitionSpec(DATA))

    def grads(self, layout: Layout, loss: LossFn, microbatches: int) -> Grads:
        specs = layout.specs()

        def grads(params: Tree, batch: Batch) -> tuple[Loss, Tree]:
            def own(p: Tree, rows: Batch) -> Loss:
                return loss(wrap(p, specs), rows, PmapContext(platform=layout.platform))

            return jax.lax.psum(accumulate(own, params, batch, microbatches, layout.declared), DATA)

        return grads

    def sums(self, layout: Layout, loss: LossFn, microbatches: int) -> Sums:
        specs = layout.specs()
        return lambda params, batch: jax.lax.psum(
            loss(wrap(params, specs), batch, PmapContext(platform=layout.platform)), DATA
        )

    def rows(self, layout: Layout, outputs: OutputsFn) -> Outputs:
        specs, ctx = layout.specs(), PmapContext(platform=layout.platform)

        def rows(params: Tree, batch: Batch) -> dict[str, jax.Array]:
            return jax.tree.map(ctx.gather_examples, outputs(wrap(params, specs), batch, ctx))

        return rows

    def trace(self, layout: Layout, function: Callable[..., object], *args: Any, out: object, donate: bool) -> Traced:
        assert layout.mesh is not None
        devices = list(layout.mesh.devices.flat)
        axes: Any = {"axis_name": DATA, "in_axes": (None, 0), "out_axes": None, "devices": devices}
        donated = (0,) if donate else ()
        if jax.process_count() == 1:
            return jax.jit(jax.pmap(function, **axes), donate_argnums=donated, out_shardings=out).trace(*args)
        # Inside jit, jax.pmap would see the devices of this process alone. Lowered by itself, for shapes of global
        # arrays, it is called with those: nothing is converted to local arrays and back, as jax.pmap does in each call.
        shapes = jax.tree.map(lambda x: jax.typeof(jax.ShapeDtypeStruct(x.shape, x.dtype)), args)
        lowered = jax.pmap(function, **axes, axis_size=len(devices), donate_argnums=donated).lower(*shapes)
        first, rows = shapes
        each = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
        replica = jax.make_jaxpr(function, axis_env=[(DATA, len(devices))])(first, each)
        return Replicas(replica, lowered)
