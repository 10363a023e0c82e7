"""Declarations of parameters; shapes, shardings and initial values are maps over the declared tree."""

import dataclasses
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.core.errors import RecipeError

CUT = 0.87962566103423978
"""Standard deviation of a standard normal distribution truncated at -2 and 2."""

Tree = Any
"""A nested dict of leaves."""

Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]
"""(key, shape) → float32 array."""


@dataclass(frozen=True)
class Param:
    """A parameter: its shape, the name of each dim ("embed hidden"; `_` for a dim that no rule may split),
    its initialisation, and whether weight decay applies to it.

    `fan_in` names the dims that are summed over when the parameter is applied: a matrix optimizer treats those as rows
    and the rest, except `layer` and `experts`, as columns. With `rate`, each step moves the parameter by `rate` against
    the sign of its gradient, and the optimizer does not change it. `exact` keeps it in float32 whatever the compute
    dtype. `unpadded` is the shape without padding: values beyond it are zero, and the model must keep them zero.
    """

    shape: tuple[int, ...]
    dims: str
    init: Init
    decay: bool = True
    fan_in: tuple[str, ...] = ()
    rate: float | None = None
    exact: bool = False
    unpadded: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.shape), f"{self.dims!r} does not name {self.shape}"

    @property
    def names(self) -> tuple[str, ...]:
        """One name for each dim."""
        return tuple(self.dims.split())

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def paths(tree: Tree) -> Tree:
    """The same tree with each leaf replaced by its dotted path."""
    return jax.tree.map_with_path(lambda path, _: dotted(path), tree)


def dotted(path: tuple[object, ...]) -> str:
    """A JAX key path as a dotted name: `block.attention.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def initial(tree: Tree, key: jax.Array, dtype: str) -> Tree:
    """Initial values. Each parameter's key comes from its path, so adding one changes no other.

    Raises RecipeError if an initial value is not floating-point or not of the declared shape.
    """

    def value(name: str, param: Param) -> jax.Array:
        shape = param.unpadded or param.shape
        array = param.init(jax.random.fold_in(key, zlib.crc32(name.encode())), shape)
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.shape != shape:
            returned = f"its init returns {array.dtype}{list(array.shape)}"
            hint = "keep integers and constants in fields of the model, not in parameters"
            raise RecipeError(f"parameter {name} is declared as float{list(shape)}; {returned}", hint)
        return jnp.pad(array, [(0, whole - part) for whole, part in zip(param.shape, shape)]).astype(dtype)

    return jax.tree.map(value, paths(tree), tree)


def abstract(tree: Tree, dtype: str) -> Tree:
    """Shapes and dtypes without values."""
    return jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, jnp.dtype(dtype)), tree)


def count(tree: Tree) -> int:
    """Number of values in the whole tree, padding left out."""
    return sum(math.prod(param.unpadded or param.shape) for param in jax.tree.leaves(tree))


def stacked(tree: Tree, layers: int) -> Tree:
    """The parameters of `layers` equal blocks, as one tree with a leading `layer` dim."""

    def stack(param: Param) -> Param:
        def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(layers))
            return jax.vmap(lambda k: param.init(k, shape[1:]))(keys)

        return dataclasses.replace(param, shape=(layers, *param.shape), dims=f"layer {param.dims}", init=init)

    return jax.tree.map(stack, tree)


def normal(std: float) -> Init:
    """A normal distribution truncated at two standard deviations, rescaled to standard deviation `std`."""
    return lambda key, shape: std / CUT * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


def zeros(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """All zero."""
    return jnp.zeros(shape, jnp.float32)


def ones(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """All one."""
    return jnp.ones(shape, jnp.float32)
