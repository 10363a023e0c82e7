"""What an engine is: how a batch is placed, where gradients are summed, how a step is traced."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.core.errors import RecipeError
from dtrain.data.batch import Batch
from dtrain.models.nn.context import Context
from dtrain.models.nn.model import Loss
from dtrain.models.nn.param import Tree
from dtrain.models.nn.vma import axes_of, vary
from dtrain.parallel.rules import Layout

LossFn = Callable[[Tree, Batch, Context], Loss]
Grads = Callable[[Tree, Batch], tuple[Loss, Tree]]
Sums = Callable[[Tree, Batch], Loss]


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """What every engine's section can say to the compiler."""

    xla: dict[str, bool | int | str] = field(default_factory=dict)
    """Options of XLA: {xla_tpu_overlap_compute_collective_tc: true}. Those of other hardware are passed over."""

    def options(self, platform: str) -> dict[str, bool | str]:
        """The options that this platform's compiler knows."""
        others = {"tpu": ("xla_gpu_", "xla_cpu_"), "gpu": ("xla_tpu_", "xla_jf_", "xla_cpu_")}
        foreign = others.get(platform, ("xla_tpu_", "xla_jf_", "xla_gpu_", "xla_enable_async_"))
        line = {name: value if isinstance(value, bool) else str(value) for name, value in self.xla.items()}
        return {name: value for name, value in line.items() if not name.startswith(foreign)}

    def compile(self, step: jax.stages.Traced, platform: str) -> jax.stages.Compiled:
        """The traced step, compiled. RecipeError names an option that the compiler does not know."""
        try:
            return step.lower().compile(compiler_options=self.options(platform) or None)
        except jax.errors.JaxRuntimeError as error:
            refuse_unknown(error)
            raise


def refuse_unknown(error: Exception) -> None:
    """RecipeError where the compiler says that an option of engine.xla does not exist."""
    unknown = re.search(r"No such compile option: '(\w+)'", str(error))
    if unknown:
        raise RecipeError(f"engine.xla.{unknown.group(1)}: this compiler has no such option") from error


class Engine(Protocol):
    """`jit`, `shard_map` or `pmap`: the recipe's `engine` section itself. Results are always global."""

    def compile(self, step: jax.stages.Traced, platform: str) -> jax.stages.Compiled:
        """The traced step, compiled with the section's options."""
        ...

    def refusal(self, layout: Layout, processes: int) -> str:
        """Why this engine cannot serve such a layout; empty where it can."""
        ...

    def place(
        self, layout: Layout, name: str, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], jax.sharding.NamedSharding]:
        """The global shape and sharding that the batch array of this name and shape takes."""
        ...

    def grads(self, layout: Layout, loss: LossFn, microbatches: int) -> Grads:
        """(params, batch) → the summed loss and the gradients of its sum, over all microbatches and devices."""
        ...

    def sums(self, layout: Layout, loss: LossFn, microbatches: int) -> Sums:
        """(params, batch) → the summed loss over all devices."""
        ...

    def trace(
        self, layout: Layout, function: Callable[..., Any], *args: Any, out: Any, donate: bool
    ) -> jax.stages.Traced:
        """`function(first, batch)` traced for arrays or shapes alike.

        `out` holds the shardings of its results; `donate` gives up the first argument's memory.
        """
        ...


@dataclass(frozen=True)
class Put:
    """This process's rows of a batch of `examples` → one global batch on the devices.

    Where each array lies is worked out once, with the first batch.
    """

    engine: Engine
    layout: Layout
    examples: int
    _places: dict[str, tuple[tuple[int, ...], jax.sharding.NamedSharding, np.ndarray | None]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __call__(self, batch: Batch) -> Batch:
        if not self._places.keys() >= batch.keys():
            self._places.update({name: self._place(name, rows) for name, rows in batch.items()})
        places = {name: self._places[name] for name in batch}
        local = {
            name: (rows if places[name][2] is None else rows[:, places[name][2]]).reshape(-1, *places[name][0][1:])
            for name, rows in batch.items()
        }
        if all(sharding.is_fully_addressable for _, sharding, _ in places.values()):
            return jax.device_put(local, {name: sharding for name, (_, sharding, _) in places.items()})
        with jax.transfer_guard("allow"):  # this is the explicit transfer; JAX takes its inside for an implicit one
            return {
                name: jax.make_array_from_callback(
                    shape, sharding, partial(_part, local[name], self.held, self.examples)
                )
                for name, (shape, sharding, _) in places.items()
            }

    def _place(self, name: str, rows: np.ndarray) -> tuple[tuple[int, ...], jax.sharding.NamedSharding, Any]:
        """The global shape and sharding of an array, and the order in which a row's tokens are laid out."""
        return *self.engine.place(self.layout, name, (self.examples, *rows.shape[1:])), self.layout.zigzag_order(name)

    @cached_property
    def held(self) -> np.ndarray:
        """Which rows of the global batch this process holds."""
        return local_rows(self.layout, self.examples)


def _part(rows: np.ndarray, held: np.ndarray, examples: int, index: Any) -> np.ndarray:
    """What one device takes of the rows that this process holds."""
    start, stop, _ = index[0].indices(examples)
    first = int(np.searchsorted(held, start))
    return rows[(slice(first, first + stop - start), *index[1:])]


def local_rows(layout: Layout, examples: int) -> np.ndarray:
    """Which rows of a global batch the devices of this process hold, in order."""
    sharding = layout.sharding(layout.spec(("batch",)))
    indices = [index for index in sharding.addressable_devices_indices_map((examples,)).values() if index]
    return np.unique(np.concatenate([np.arange(*part.indices(examples)) for (part,) in indices]))


def flow(layout: Layout, microbatches: int) -> tuple[int, int]:
    """Microbatches done one after the other, and those in a pipeline at once."""
    return (1, microbatches) if layout.sizes["pipeline"] > 1 else (microbatches, 1)


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

    def add(sums: Tree, rows: Batch) -> tuple[Tree, None]:
        # XLA would add up whole gradients to reduce-scatter them once; a barrier for each, lest they vary alike
        found = jax.tree.map(jax.lax.optimization_barrier, one(rows))
        return jax.tree.map(jnp.add, sums, found), None

    return jax.lax.scan(add, start, stacked)[0]


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros that vary over the same mesh axes as what is added to them."""
    return vary(jnp.zeros(shape.shape, shape.dtype), axes_of(shape))
