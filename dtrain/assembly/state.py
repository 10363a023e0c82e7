"""The state of a run: step, parameters and optimizer state, and nothing else."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dtrain.core.errors import RecipeError
from dtrain.models.nn import param as declare
from dtrain.models.nn.param import Param, Tree, dotted
from dtrain.parallel.rules import Layout

FEW = 4096
"""Largest array of optimizer state, in values, that belongs to no parameter and is replicated without asking."""

if TYPE_CHECKING:
    import optax


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "optimizer"], meta_fields=[])
@dataclass(frozen=True)
class State:
    """`step` counts the updates so far, int32 ()."""

    step: Any
    params: Tree
    optimizer: Any


def state_initializer(
    declared: Tree, update: "optax.GradientTransformation", dtype: str, seed: int
) -> Callable[..., State]:
    """A function `make(given)` that creates the initial state: given parameters by path, random values for the others.

    It is only ever traced, so that every array is created sharded and never in full on one device.
    """

    def make(given: Mapping[str, jax.Array] = {}) -> State:
        params = declare.initial(declared, jax.random.key(seed), dtype)
        params = jax.tree.map(given.get, declare.paths(params), params)
        params = declare.averages_from(params, declared, lambda _decay, _average, value: value)
        params = jax.tree.map(given.get, declare.paths(params), params)  # an average that is given stays
        return State(jnp.zeros((), jnp.int32), params, update.init(declare.trained(params, declared)))

    return make


def abstract(
    make: Callable[..., State],
    layout: Layout,
    dims: Callable[[Tree, object], object] = lambda *_: None,
    apart: Callable[[Tree], Tree] = lambda declared: declared,
) -> State:
    """The state as shapes with their shardings.

    An array of the optimizer's state belongs to the parameter whose path is in its own path; with that parameter's
    shape it is sharded like the parameter. Arrays of other shapes are sharded by the dim names that `dims` (an
    optimizer's `state_dims`) gives them. Without names, those of a parameter that the mesh does not split, and small
    ones, are replicated; others are refused with RecipeError, since no array that may be large is replicated silently.
    `apart`: the declared parameters in the form in which the optimizer receives them.
    """
    shapes, replicated = jax.eval_shape(make), layout.sharding(PartitionSpec())
    declared = declare.trained(layout.declared, layout.declared)
    owners = Owners(apart(declared))

    def placed(path: tuple[object, ...], leaf: Any) -> Any:
        param = owners.of(path)
        spec = layout.spec(param.names) if param else PartitionSpec()
        if param and leaf.shape == param.shape:
            return _placed(leaf, layout.sharding(spec))
        possible = _reduced(leaf.shape, param.shape, spec) if param and leaf.size > 1 else {PartitionSpec()}
        if len(possible) == 1 and (param or leaf.size <= 1):
            return _placed(leaf, layout.sharding(possible.pop()))
        split = any(spec) if param else any(any(layout.spec(one.names)) for one in jax.tree.leaves(declared))
        return _placed(leaf, replicated if leaf.size <= FEW or not split else None)

    def named(part: object, placed: object) -> Any:
        names = dims(declared, part)
        if names is None:
            return placed

        def spec(leaf: object, text: str) -> Any:
            return _placed(leaf, layout.sharding(layout.spec(text.split())))

        return jax.tree.map(spec, part, names)

    def has_names(part: object) -> bool:
        return dims(declared, part) is not None

    optimizer = jax.tree.map_with_path(placed, shapes.optimizer)
    optimizer = jax.tree.map(named, shapes.optimizer, optimizer, is_leaf=has_names)
    _refuse_unplaced(optimizer, layout)
    params = jax.tree.map(lambda leaf, spec: _placed(leaf, layout.sharding(spec)), shapes.params, layout.specs())
    return State(jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated), params, optimizer)


class Owners:
    """Finds the parameter that an array of an optimizer's state belongs to, whatever container the state keeps it in.

    optax and functions of a user's own keep state in trees with the paths of the parameters somewhere inside their own:
    `0.mu.blocks.query`, or `stats.blocks.query.left` for a container at each parameter.
    """

    def __init__(self, declared: Tree) -> None:
        found = jax.tree.leaves_with_path(declared)
        self._params = {_keys(path): param for path, param in found}
        self._lengths = sorted({len(path) for path in self._params}, reverse=True)

    def of(self, path: tuple[object, ...]) -> Param | None:
        """The parameter with the longest path inside this one, the last such place; None if there is none."""
        keys = _keys(path)
        for length in self._lengths:
            for start in reversed(range(len(keys) - length + 1)):
                if param := self._params.get(keys[start : start + length]):
                    return param
        return None


def _keys(path: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(dotted((key,)) for key in path)


def _reduced(shape: tuple[int, ...], whole: tuple[int, ...], spec: PartitionSpec) -> set[PartitionSpec]:
    """The shardings of an array that has a parameter's shape without some dims, such as sums over its rows.

    Several if it is not clear which dims are missing, because they have equal sizes and are not split alike.
    """
    entries = (*spec, *[None] * (len(whole) - len(spec)))
    kept = itertools.combinations(range(len(whole)), len(shape))
    return {
        PartitionSpec(*(entries[i] for i in dims)) for dims in kept if tuple(whole[i] for i in dims) == tuple(shape)
    }


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _refuse_unplaced(optimizer: object, layout: Layout) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(optimizer):
        if leaf.sharding is None:
            what = f"optimizer state {dotted(path)} {leaf.shape} does not have the shape of a parameter"
            message = f"{what}, so its sharding over {layout.mesh.size if layout.mesh else 1} devices is unknown"
            hint = "use a mesh that does not split this parameter, or an optimizer that dtrain has"
            raise RecipeError(message, hint)


def create_state(make: Callable[..., State], shapes: State, given: Mapping[str, jax.Array] = {}) -> State:
    """Create the initial state: given parameters by path, random values for the others; each array is sharded.

    Given parameters become part of the state as they are: no second copy of them is made.
    """
    names = declare.paths(shapes.params)

    def without_given(state: State) -> State:
        params = jax.tree.map(lambda name, leaf: None if name in given else leaf, names, state.params)
        return replace(state, params=params)

    placed = placement(without_given(shapes))
    # runs once: on a CPU, random numbers take longer to compile than to draw
    fast = {"xla_backend_optimization_level": 1} if platform_of(shapes) == "cpu" else None
    made = jax.jit(lambda given: without_given(make(given)), out_shardings=placed, compiler_options=fast)(given)
    params = jax.tree.map(given.get, names, made.params, is_leaf=lambda leaf: leaf is None)
    return replace(made, params=params)


def saved(state: State, declared: Tree) -> State:
    """The part of a state that checkpoints hold: None in place of parameters that come from another run."""
    params = jax.tree.map(lambda param, leaf: leaf if param.saved else None, declared, state.params)
    return replace(state, params=params)


def completed(state: State, declared: Tree, others: Mapping[str, jax.Array]) -> State:
    """The inverse of `saved`: `others` has the parameters that it left out, by path."""

    def one(name: str, param: Param, leaf: Any) -> Any:
        return leaf if param.saved else others[name]

    names = declare.paths(declared)
    return replace(state, params=jax.tree.map(one, names, declared, state.params, is_leaf=lambda leaf: leaf is None))


def platform_of(shapes: State) -> str:
    """The platform of the devices that hold such a state: cpu, gpu or tpu."""
    return next(iter(shapes.step.sharding.device_set)).platform


def placement(tree: object) -> Any:
    """The sharding of every array in the tree."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
