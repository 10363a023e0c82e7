"""Declarations of parameters; shapes, shardings and initial values are maps over the declared tree."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
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

UNNAMED = "?"
"""A dim without a name: the largest one of a parameter that fsdp divides is split over it."""


@dataclass(frozen=True)
class MadeTogether:
    """An `Init` that is the value number `index` of a function that makes the values of all parameters from one key."""

    function: Callable[[jax.Array], Sequence[jax.Array]]
    index: int

    def __call__(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return self.function(key)[self.index]


@dataclass(frozen=True)
class Param:
    """A parameter: its shape, the name of each dim ("embed hidden"; `_` for a dim that no rule may split),
    its initialisation, and whether weight decay applies to it.

    `fan_in` names the dims that are summed over when the parameter is applied: a matrix optimizer treats those as rows
    and the rest, except `layer` and `experts`, as columns. With `rate`, each step moves the parameter by `rate` against
    the sign of its gradient, and the optimizer does not change it. `exact` keeps it in float32 whatever the compute
    dtype. `unpadded` is the shape without padding: values beyond it are zero, and the model must keep them zero.
    With `trained=False` no gradient is computed, the optimizer neither changes it nor keeps a state for it; the loss
    may then give its next value in `Loss.statistics`. With `saved=False` it is not in checkpoints: it never changes,
    and comes from another run. `lr` multiplies the learning rate; `weight_decay`, if given, decides about weight decay
    in place of `decay`; `group` is the pattern of the group of the recipe's optimizer that it is in. `dtype` is that in
    which a frozen parameter is kept, in place of the recipe's. `average`, the path of another parameter and a decay,
    makes it the exponential moving average of that parameter: it starts from the same values, and each step moves it.
    """

    shape: tuple[int, ...]
    dims: str
    init: Init
    decay: bool = True
    fan_in: tuple[str, ...] = ()
    rate: float | None = None
    exact: bool = False
    unpadded: tuple[int, ...] | None = None
    trained: bool = True
    lr: float = 1.0
    weight_decay: bool | None = None
    saved: bool = True
    group: str = ""
    dtype: str = ""
    average: tuple[str, float] | None = None

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

    def kept_in(self, dtype: str) -> str:
        """The dtype in which it is kept, where those without one of their own are in `dtype`."""
        return self.dtype or dtype

    def bytes(self, dtype: str) -> int:
        """Bytes of all its values, kept in that dtype if it has none of its own."""
        return self.size * jnp.dtype(self.kept_in(dtype)).itemsize


def paths(tree: Tree) -> Tree:
    """The same tree with each leaf replaced by its dotted path."""
    return jax.tree.map_with_path(lambda path, _: dotted(path), tree)


def dotted(path: tuple[object, ...]) -> str:
    """A JAX key path as a dotted name: `block.attention.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def initial(tree: Tree, key: jax.Array, dtype: str) -> Tree:
    """Initial values. Each parameter's key comes from its path, so adding one changes no other.

    A function that makes several parameters together (`MadeTogether`) is called once.
    Raises RecipeError if an initial value is not floating-point or not of the declared shape.
    """
    made: dict[Callable[[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]] = {}

    def first_value(name: str, param: Param, shape: tuple[int, ...]) -> jax.Array:
        if not isinstance(param.init, MadeTogether):
            return param.init(jax.random.fold_in(key, zlib.crc32(name.encode())), shape)
        function = param.init.function
        if function not in made:
            made[function] = function(jax.random.fold_in(key, zlib.crc32(b"init")))
        return made[function][param.init.index]

    def value(name: str, param: Param) -> jax.Array:
        shape = param.unpadded or param.shape
        array = first_value(name, param, shape)
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.shape != shape:
            returned = f"its init returns {array.dtype}{list(array.shape)}"
            hint = "keep integers and constants in fields of the model, not in parameters"
            raise RecipeError(f"parameter {name} is declared as float{list(shape)}; {returned}", hint)
        padding = [(0, whole - part) for whole, part in zip(param.shape, shape)]
        return (jnp.pad(array, padding) if padding else array).astype(param.kept_in(dtype))  # jnp.pad refuses scalars

    return jax.tree.map(value, paths(tree), tree)


def averages_from(tree: Tree, declared: Tree, mix: Callable[[float, Any, Any], Any]) -> Tree:
    """The tree with `mix(decay, average, value)` in place of each parameter that is the average of another one."""
    values = dict(zip(jax.tree.leaves(paths(declared)), jax.tree.leaves(tree), strict=True))

    def one(param: Param, leaf: Any) -> Any:
        return leaf if param.average is None else mix(param.average[1], leaf, values[param.average[0]])

    return jax.tree.map(one, declared, tree)


def trained(tree: Tree, declared: Tree) -> Tree:
    """The tree with None in place of the leaves of parameters that are not trained."""
    return jax.tree.map(lambda param, leaf: leaf if param.trained else None, declared, tree)


def merged(part: Tree, whole: Tree, declared: Tree) -> Tree:
    """`whole` with the leaves of trained parameters from `part`, a result of `trained`."""
    return jax.tree.map(lambda param, own, leaf: own if param.trained else leaf, declared, part, whole)


def abstract(tree: Tree, dtype: str) -> Tree:
    """Shapes and dtypes without values; whole numbers stay in their own."""

    def one(param: Param) -> jax.ShapeDtypeStruct:
        whole = param.dtype and not jnp.issubdtype(param.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype if whole else dtype))

    return jax.tree.map(one, tree)


def count(tree: Tree) -> int:
    """Number of values in the whole tree, padding left out."""
    return sum(math.prod(param.unpadded or param.shape) for param in jax.tree.leaves(tree))


def stacked(tree: Tree, layers: int) -> Tree:
    """The parameters of `layers` equal blocks, as one tree with a leading `layer` dim."""

    def stack(param: Param) -> Param:
        def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(layers))
            return jax.vmap(lambda k: param.init(k, shape[1:]))(keys)

        unpadded = param.unpadded and (layers, *param.unpadded)
        shape, dims = (layers, *param.shape), f"layer {param.dims}"
        return dataclasses.replace(param, shape=shape, dims=dims, init=init, unpadded=unpadded)

    return jax.tree.map(stack, tree)


def normal(std: float) -> Init:
    """A normal distribution truncated at two standard deviations, rescaled to standard deviation `std`."""
    return lambda key, shape: std / CUT * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


def uniform(bound: float) -> Init:
    """A uniform distribution between -bound and bound."""
    return lambda key, shape: jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def zeros(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """All zero."""
    return jnp.zeros(shape, jnp.float32)


def ones(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """All one."""
    return jnp.ones(shape, jnp.float32)
