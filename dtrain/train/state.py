"""The state of a run: step, parameters, optimizer state, and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dtrain import params as declare
from dtrain.parallel.rules import Layout
from dtrain.params import Tree

if TYPE_CHECKING:
    import optax


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "optimizer"], meta_fields=[])
@dataclass(frozen=True)
class State:
    """`step` counts the updates done, int32 ()."""

    step: Any
    params: Tree
    optimizer: Any


def maker(declared: Tree, update: "optax.GradientTransformation", dtype: str, seed: int) -> Callable[..., State]:
    """A function that makes the first state, of parameters that are given or else drawn.

    It is traced only, so that no array is born whole.
    """

    def make(given: Tree | None = None) -> State:
        params = declare.initial(declared, jax.random.key(seed), dtype) if given is None else given
        return State(jnp.zeros((), jnp.int32), params, update.init(params))

    return make


def abstract(make: Callable[..., State], update: "optax.GradientTransformation", layout: Layout) -> State:
    """The state as shapes with their shardings.

    What the optimizer keeps for a parameter lies where the parameter lies. What has another shape
    than its parameter (a count, a factored moment) is small and stands whole on every device.
    """
    import optax

    shapes, whole = jax.eval_shape(make), layout.sharding(PartitionSpec())

    def like(leaf: Any, param: Any, spec: PartitionSpec) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf  # of a parameter that another part of the optimizer serves
        place = layout.sharding(spec) if leaf.shape == param.shape else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    specs = layout.specs()
    return State(
        jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        jax.tree.map(like, shapes.params, shapes.params, specs),
        optax.tree_map_params(
            update,
            like,
            shapes.optimizer,
            shapes.params,
            specs,
            transform_non_params=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
            is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        ),
    )


def born(make: Callable[..., State], shapes: State, given: Tree | None = None) -> State:
    """The first state, of parameters that are given or else drawn, each array made in its place."""
    return jax.jit(make, out_shardings=placement(shapes))(given)


def placement(tree: Any) -> Any:
    """The sharding of every array."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
