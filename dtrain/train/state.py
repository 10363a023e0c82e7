"""The state of a run: step, parameters, optimizer state, and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dtrain.core.errors import RecipeError
from dtrain.models.nn import param as declare
from dtrain.models.nn.param import Tree, dotted
from dtrain.parallel.rules import Layout

FEW = 4096
"""Values of an array that belongs to no parameter and is replicated without more ado."""

if TYPE_CHECKING:
    import optax


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "optimizer"], meta_fields=[])
@dataclass(frozen=True)
class State:
    """`step` counts the updates done, int32 ()."""

    step: Any
    params: Tree
    optimizer: Any


def state_initializer(
    declared: Tree, update: "optax.GradientTransformation", dtype: str, seed: int
) -> Callable[..., State]:
    """A function that makes the first state, of parameters that are given or else drawn.

    It is traced only, so that no array is born whole.
    """

    def make(given: Tree | None = None) -> State:
        params = declare.initial(declared, jax.random.key(seed), dtype) if given is None else given
        return State(jnp.zeros((), jnp.int32), params, update.init(params))

    return make


def abstract(
    make: Callable[..., State],
    update: "optax.GradientTransformation",
    layout: Layout,
    dims: Callable[[Tree, Any], Any] = lambda *_: None,
) -> State:
    """The state as shapes with their shardings.

    What the optimizer keeps for a parameter, of the same shape, is laid out as the parameter. Arrays of another
    shape are laid out by the names that `dims` (an optimizer's `state_dims`) gives to theirs. RecipeError where
    it gives none: nothing that may be large is replicated silently.
    """
    import optax

    shapes, replicated = jax.eval_shape(make), layout.sharding(PartitionSpec())

    def like(leaf: Any, param: Any, spec: PartitionSpec) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf  # of a parameter that another part of the optimizer serves
        known = leaf.shape == param.shape or leaf.size <= 1
        return _placed(leaf, layout.sharding(spec if leaf.shape == param.shape else PartitionSpec()) if known else None)

    def other(leaf: Any) -> Any:
        return _placed(leaf, replicated if leaf.size <= FEW else None)

    def named(part: Any, found: Any) -> Any:
        names = dims(layout.declared, part)
        if names is None:
            return found
        spec = lambda leaf, text: _placed(leaf, layout.sharding(layout.spec(text.split())))  # noqa: E731
        return jax.tree.map(spec, part, names)

    specs, masked = layout.specs(), lambda leaf: isinstance(leaf, optax.MaskedNode)
    optimizer = optax.tree_map_params(
        update, like, shapes.optimizer, shapes.params, specs, transform_non_params=other, is_leaf=masked
    )
    has_names = lambda part: dims(layout.declared, part) is not None  # noqa: E731
    optimizer = jax.tree.map(named, shapes.optimizer, optimizer, is_leaf=lambda part: masked(part) or has_names(part))
    _refuse_unplaced(optimizer, layout)
    params = jax.tree.map(like, shapes.params, shapes.params, specs)
    return State(jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated), params, optimizer)


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _refuse_unplaced(optimizer: Any, layout: Layout) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(optimizer):
        if leaf.sharding is None:
            what = f"the optimizer keeps {dotted(path)} {leaf.shape}, which is shaped as no parameter"
            message = f"{what}, and does not state how it is laid over {layout.mesh.size if layout.mesh else 1} devices"
            raise RecipeError(message, "give the optimizer a state_dims that names the dims of such arrays")


def create_state(make: Callable[..., State], shapes: State, given: Tree | None = None) -> State:
    """The first state, of parameters that are given or else drawn, each array made in its place."""
    return jax.jit(make, out_shardings=placement(shapes))(given)


def placement(tree: Any) -> Any:
    """The sharding of every array."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
