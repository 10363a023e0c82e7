"""A parameter is declared once; everything else about it is a map over the declared tree."""

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
"""Standard deviation of a standard normal distribution that is cut at -2 and 2."""

Tree = Any
"""A nested dict of leaves."""

Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]
"""(key, shape) → float32 array."""


@dataclass(frozen=True)
class Param:
    """A parameter: its shape, the name of each dim ("embed hidden"; `_` for one no rule may split),
    how it is initialised, and whether weight decay acts on it.

    `fan_in` names the dims that are summed over when the parameter is applied: a matrix optimizer
    takes those as rows and the rest, less `layer` and `experts`, as columns. `rate`, where given, makes
    the parameter move by that much against the sign of its gradient at each step, and by nothing else.
    `exact` keeps it in float32 whatever precision is computed in. `unpadded`, where given, is the shape
    without padding: what lies beyond it is zero, and the model must see to it that it stays so.
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
    """The same tree with each leaf's dotted path in its place."""
    return jax.tree.map_with_path(lambda path, _: dotted(path), tree)


def dotted(path: tuple[Any, ...]) -> str:
    """A key path of JAX as a dotted name: `block.attention.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def initial(tree: Tree, key: jax.Array, dtype: str) -> Tree:
    """Initial values. Each parameter's key comes from its path, so adding one changes no other.

    RecipeError where an initial value is not floating-point, or not of the declared shape.
    """

    def value(name: str, param: Param) -> jax.Array:
        shape = param.unpadded or param.shape
        found = param.init(jax.random.fold_in(key, zlib.crc32(name.encode())), shape)
        if not jnp.issubdtype(found.dtype, jnp.floating) or found.shape != shape:
            gives = f"its init gives {found.dtype}{list(found.shape)}"
            hint = "keep whole numbers and constants in the model's own fields, not in parameters"
            raise RecipeError(f"parameter {name} is declared as float{list(shape)}; {gives}", hint)
        return jnp.pad(found, [(0, whole - part) for whole, part in zip(param.shape, shape)]).astype(dtype)

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
            return jax.vmap(lambda one: param.init(one, shape[1:]))(keys)

        return dataclasses.replace(param, shape=(layers, *param.shape), dims=f"layer {param.dims}", init=init)

    return jax.tree.map(stack, tree)


def normal(std: float) -> Init:
    """A normal distribution cut at two standard deviations, scaled so that `std` is its own."""
    return lambda key, shape: std / CUT * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


def zeros(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """All zero."""
    return jnp.zeros(shape, jnp.float32)


def ones(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """All one."""
    return jnp.ones(shape, jnp.float32)
