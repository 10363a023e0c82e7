"""What an engine is: how a batch is placed, where gradients are summed, how a step is traced."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.batch import Batch
from dtrain.context import Context
from dtrain.model import Loss
from dtrain.parallel.rules import Layout
from dtrain.params import Tree

LossFn = Callable[[Tree, Batch, Context], Loss]
Grads = Callable[[Tree, Batch], tuple[Loss, Tree]]
Sums = Callable[[Tree, Batch], Loss]


class Engine(Protocol):
    """`jit`, `shard_map` or `pmap`: the recipe's `engine` section itself. Results are always global."""

    def refusal(self, layout: Layout, processes: int) -> str:
        """Why this engine cannot serve such a layout; empty where it can."""
        ...

    def place(self, layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[int, ...], jax.sharding.NamedSharding]:
        """The global shape and sharding that a batch array of this shape takes."""
        ...

    def grads(self, layout: Layout, loss: LossFn, microbatches: int) -> Grads:
        """(params, batch) → the summed loss and the gradients of its sum, over all microbatches and devices."""
        ...

    def sums(self, layout: Layout, loss: LossFn) -> Sums:
        """(params, batch) → the summed loss over all devices."""
        ...

    def trace(
        self, layout: Layout, function: Callable[..., Any], *args: Any, out: Any, donate: bool
    ) -> jax.stages.Traced:
        """`function(first, batch)` traced for arrays or shapes alike.

        `out` holds the shardings of its results; `donate` gives up the first argument's memory.
        """
        ...


def put(engine: Engine, layout: Layout, batch: Batch, examples: int) -> Batch:
    """This process's rows of a batch of `examples` → one global batch on the devices."""

    places = {name: engine.place(layout, (examples, *rows.shape[1:])) for name, rows in batch.items()}
    local = {name: rows.reshape(-1, *places[name][0][1:]) for name, rows in batch.items()}
    if all(sharding.is_fully_addressable for _, sharding in places.values()):
        return jax.device_put(local, {name: sharding for name, (_, sharding) in places.items()})
    with jax.transfer_guard("allow"):  # this is the explicit transfer; JAX takes its inside for an implicit one
        return {
            name: jax.make_array_from_process_local_data(sharding, local[name], shape)
            for name, (shape, sharding) in places.items()
        }


def local_rows(layout: Layout, examples: int) -> np.ndarray:
    """Which rows of a global batch the devices of this process hold, in order."""
    sharding = layout.sharding(layout.spec(("batch",)))
    indices = [index for index in sharding.addressable_devices_indices_map((examples,)).values() if index]
    held = {row for (part,) in indices for row in range(*part.indices(examples))}
    return np.array(sorted(held), np.int64)


def accumulate(loss: Callable[[Tree, Batch], Loss], params: Tree, batch: Batch, parts: int) -> tuple[Loss, Tree]:
    """The loss and the gradients of its sum, one part of the batch at a time.

    Part i takes every `parts`-th row from row i on, so that each device keeps its own rows.
    """

    def one(rows: Batch) -> tuple[Loss, Tree]:
        def scalar(params: Tree) -> tuple[jax.Array, Loss]:
            found = loss(params, rows)
            return found.sum, found

        (_, found), gradients = jax.value_and_grad(scalar, has_aux=True)(params)
        return found, gradients

    if parts == 1:
        return one(batch)
    stacked = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch)
    first = jax.tree.map(lambda x: x[0], stacked)
    start = jax.tree.map(_zeros, jax.eval_shape(one, first))
    total, _ = jax.lax.scan(lambda sums, rows: (jax.tree.map(jnp.add, sums, one(rows)), None), start, stacked)
    return total


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros that vary over the same mesh axes as what is added to them."""
    zeros, varying = jnp.zeros(shape.shape, shape.dtype), tuple(getattr(shape.manual_axis_type, "varying", ()))
    return jax.lax.pcast(zeros, varying, to="varying") if varying else zeros
