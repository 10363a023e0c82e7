"""The declared parameters of a user's model: from its `params()`, or from the shapes of what its `init` returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import jax
import jax.numpy as jnp

from dtrain.core.errors import RecipeError
from dtrain.data.batch import Batch
from dtrain.models.nn.param import UNNAMED, MadeTogether, Param, Tree, dotted, paths
from dtrain.models.nn.patterns import matched

DECLARE = "declare each with dtrain.Param(shape, dims, init); other values belong in fields of the class"


class WithInit(Protocol):
    """A user's model that makes its parameters itself."""

    def init(self, key: jax.Array, example: Batch) -> Tree:
        """The initial parameters, from a random key and a batch of one example that is all zeros."""
        ...


def from_params(tree: Tree) -> Tree:
    """The tree that `params()` returned. RecipeError if a leaf is no Param, or two leaves have one path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [dotted(path) for path, _ in leaves]
    wrong = [f"{name}: {type(leaf).__name__}" for name, (_, leaf) in zip(names, leaves, strict=True) if not _is(leaf)]
    if wrong:
        raise RecipeError(f"params() returns {wrong[0]}; every leaf must be a Param with a path of its own", DECLARE)
    _refuse_equal(names, "params()")
    return tree


def from_init(model: WithInit, example: Mapping[str, jax.ShapeDtypeStruct]) -> Tree:
    """A Param for each array that `init` returns, without creating any array.

    All initial values come from one call of `init`, which is traced and compiled with the shardings of the parameters,
    so that none is created in full on one device. Weight decay applies to arrays with at least two dims. RecipeError if
    `init` returns anything but floating-point arrays.
    """

    def make(key: jax.Array) -> Tree:
        return model.init(key, {name: jnp.zeros(of.shape, of.dtype) for name, of in example.items()})

    def values(key: jax.Array) -> Sequence[jax.Array]:
        return jax.tree.leaves(make(key))

    shapes, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(lambda: make(jax.random.key(0))))
    for path, leaf in shapes:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            hint = "keep integers, random keys and constants out of what init returns: in fields of the class"
            raise RecipeError(
                f"init() returns {dotted(path)} of type {leaf.dtype}; parameters are floating-point", hint
            )
    _refuse_equal([dotted(path) for path, _ in shapes], "init()")
    params = [
        Param(leaf.shape, " ".join([UNNAMED] * leaf.ndim), MadeTogether(values, i), decay=leaf.ndim > 1)
        for i, (_, leaf) in enumerate(shapes)
    ]
    return jax.tree.unflatten(structure, params)


def with_dims(tree: Tree, table: Mapping[str, str], where: str) -> Tree:
    """The tree with the dim names that `table` has for patterns of paths: {"*kernel": "embed hidden"}."""
    chosen = matched(table, jax.tree.leaves(paths(tree)), where)

    def named(name: str, param: Param) -> Param:
        if name not in chosen:
            return param
        dims = table[chosen[name]]
        if len(dims.split()) != len(param.shape):
            message = f"{where}: {dims!r} names {len(dims.split())} dims; parameter {name} has shape {param.shape}"
            raise RecipeError(message, "one name for each dim; `_` for a dim that is not split")
        return replace(param, dims=dims)

    return jax.tree.map(named, paths(tree), tree)


def with_statistics(tree: Tree, chosen: Sequence[str] | Callable[[str], bool], where: str) -> Tree:
    """The tree with some parameters declared as not trained, and kept in float32.

    `chosen`: patterns of their paths, or a function of a path.
    """
    if not callable(chosen):
        chosen = matched(chosen, jax.tree.leaves(paths(tree)), where).__contains__

    def kept(name: str, param: Param) -> Param:
        return replace(param, trained=False, exact=True, decay=False) if chosen(name) else param

    return jax.tree.map(kept, paths(tree), tree)


def _is(leaf: object) -> bool:
    return isinstance(leaf, Param)


def _refuse_equal(names: Sequence[str], made_by: str) -> None:
    twice = max(names, key=names.count, default="")
    if names.count(twice) > 1:
        raise RecipeError(
            f"{made_by} returns {twice} twice; every leaf must be a Param with a path of its own", DECLARE
        )
