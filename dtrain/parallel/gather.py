"""Parameters that are split to save memory (FSDP): all-gather before use, reduce-scatter of the gradients."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dtrain.core.errors import RecipeError
from dtrain.models.nn.low_rank import LowRank
from dtrain.models.nn.param import Tree
from dtrain.models.nn.quantised import Quantised, is_quantised
from dtrain.models.nn.single_device import rows_of
from dtrain.parallel.mesh import FSDP_AXES

Cuts = tuple[tuple[int, tuple[str, ...]], ...]
"""(dim, the mesh axes that split it, major to minor)."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "low_rank", "narrow"],
    meta_fields=["axes", "dtype", "scale", "merge"],
)
@dataclass(frozen=True)
class NotGathered:
    """A parameter that is not yet gathered, and the axes that split each of its dims; `ctx.gather` gives the array.

    A scan over layers removes leading dims and reshapes add some, so the axes are matched from the last dim.
    """

    value: jax.Array
    axes: tuple[Any, ...]
    dtype: str | None = None
    """Dtype of the gathered parameter; None: that of `value`, in which the gradient is always summed."""
    low_rank: "tuple[NotGathered, NotGathered] | None" = None
    """A and B of an adapter: the parameter is value + scale x A B."""
    scale: float = 1.0
    merge: bool = False
    """Whether gathering gives an array; else a `LowRank`, a `Quantised` matrix, or both."""
    narrow: Quantised | None = None
    """Of a quantised matrix: its form, with scales that are not gathered; its codes are `value`."""

    def with_low_rank(self, a: "NotGathered", b: "NotGathered", scale: float, merge: bool) -> "NotGathered":
        """The same parameter with an adapter."""
        return replace(self, low_rank=(a, b), scale=scale, merge=merge)

    def quantised_by(self, narrow: Quantised, merge: bool) -> "NotGathered":
        """The parameter whose codes this is; `narrow` has its scales."""
        return replace(self, narrow=replace(narrow, codes=None), merge=merge)

    def completed(self, x: jax.Array, gather: Callable[["NotGathered"], Any], whole: bool = True) -> Any:
        """The gathered value x, with its scales and its adapter, if it has them, gathered by `gather`.

        `whole`: whether x is gathered already; else a `Quantised` keeps the axes that split it when it is.
        """
        full: Any = x
        if self.narrow is not None:
            kept = None if whole else tuple(memory_left_out(entry) for entry in self.axes)
            full = replace(self.narrow, codes=x, scales=gather(self.narrow.scales), kept=kept)
            full = full.wide() if self.merge else full
        if self.low_rank is None:
            return full
        a, b = map(gather, self.low_rank)
        both = LowRank(full, a, b, self.scale)
        return both.merged() if self.merge else both

    def computed_in(self, dtype: str, reduce: str) -> "NotGathered":
        """The same parameter, gathered in `dtype`; its gradient is summed in float32, or, by "compute", in `dtype`."""
        if reduce == "compute":
            return replace(self, value=self.value.astype(dtype))
        return replace(self, dtype=dtype)

    def _misused(self, *_: Any) -> Any:
        message = "a parameter is used before it is gathered"
        raise RecipeError(message, "call ctx.gather on the parameters of a layer before using them")

    __jax_array__ = __array__ = __getitem__ = __matmul__ = __rmatmul__ = __mul__ = __rmul__ = _misused
    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __pow__ = __neg__ = __iter__ = __len__ = _misused

    @property
    def shape(self) -> Any:
        self._misused()

    @property
    def T(self) -> Any:
        self._misused()

    @property
    def spec(self) -> PartitionSpec:
        """The sharding of the parameter, as a PartitionSpec."""
        return PartitionSpec(*self.axes)


def wrap(params: Tree, specs: Tree) -> Tree:
    """Each parameter as a NotGathered with the axes of its spec."""

    def part(value: jax.Array, spec: PartitionSpec) -> NotGathered:
        return NotGathered(value, (*spec, *[None] * (value.ndim - len(spec))))

    return jax.tree.map(part, params, specs)


def specs_of(params: Tree) -> Tree:
    """The same tree of parameters that are not gathered, each array replaced by its PartitionSpec."""

    def one(part: NotGathered) -> NotGathered:
        thin = None if part.low_rank is None else tuple(map(one, part.low_rank))
        narrow = None if part.narrow is None else replace(part.narrow, scales=one(part.narrow.scales))
        return replace(part, value=part.spec, low_rank=thin, narrow=narrow)

    return jax.tree.map(one, params, is_leaf=is_wrapped)


def memory_left_out(entry: Any) -> Any:
    """An entry of a PartitionSpec without the axes that only save memory."""
    axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
    return tuple(axis for axis in axes if axis not in FSDP_AXES) or None


def is_wrapped(leaf: object) -> bool:
    """Whether this leaf is a parameter that is not yet gathered."""
    return isinstance(leaf, NotGathered)


def unwrapped(params: Tree) -> Tree:
    """The parameters as arrays in their compute dtype, for engines whose arrays are full parameters."""

    def array(part: Any) -> Any:
        if not is_wrapped(part):
            return part
        return part.completed(part.value.astype(part.dtype or part.value.dtype), array, whole=False)

    return jax.tree.map(array, params, is_leaf=is_wrapped)


def gathered_in(params: Tree, sharding: Callable[[PartitionSpec], Any]) -> Tree:
    """Parameters of a layer under jit, whose quantised matrices the compiler gathers as codes: their values are
    computed after it."""

    def one(leaf: Any) -> Any:
        if not is_quantised(leaf) or leaf.kept is None:
            return leaf
        entries = (*[None] * leaf.ndim, *leaf.kept)[-leaf.ndim :]
        return replace(leaf, kept=sharding(PartitionSpec(*entries)))

    return jax.tree.map(one, params, is_leaf=is_quantised)


def looked_up(table: Tree, token_BT: jax.Array, *, stacked: bool) -> jax.Array:
    """Rows of a full table, cast after the lookup: gradients of a row are summed in the dtype of the table."""
    if not is_wrapped(table):
        return rows_of(table, token_BT, stacked=stacked)
    row_BTE = rows_of(table.value, token_BT, stacked=stacked)
    return row_BTE.astype(table.dtype or row_BTE.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gathered(x: jax.Array, cuts: Cuts, dtype: str, sums: str) -> jax.Array:
    """All-gather x in `dtype` along each (dim, axes); its gradient is reduce-scattered in the dtype `sums`.

    On a TPU, an all-gather along several axes at once uses the links of all dims of the torus.
    """
    return _gather_forward(x, cuts, dtype, sums)[0]


def _gather_forward(x: jax.Array, cuts: Cuts, dtype: str, _: str) -> tuple[jax.Array, None]:
    x = x.astype(dtype)
    for dim, axes in cuts:
        x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    return x, None


def _gather_backward(cuts: Cuts, _: str, sums: str, __: None, gradient: jax.Array) -> tuple[jax.Array]:
    gradient = gradient.astype(sums)
    for dim, axes in reversed(cuts):
        gradient = _reduce_scattered(gradient, dim, axes)
    return (gradient,)


gathered.defvjp(_gather_forward, _gather_backward)


def _reduce_scattered(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """The sum of x over the devices along these axes, of which each device keeps its part of `dim`.

    Several axes are dims of a TPU torus. XLA compiles a reduce-scatter over all dims of a torus at once as an
    all-reduce, so the last one goes by itself. On a torus of three dims it does the same, or fails, for some shapes
    such as those with heads and head dim: there x becomes a matrix whose rows are scattered.
    """
    others = (*x.shape[:dim], *x.shape[dim + 1 :])
    as_matrix = len(axes) > 2 and x.ndim > 1 and dim in (0, x.ndim - 1)
    if as_matrix:
        x = jnp.moveaxis(x, dim, 0).reshape(x.shape[dim], -1)
    for some in filter(None, (axes[:-1], axes[-1:])):
        x = jax.lax.psum_scatter(x, some, scatter_dimension=0 if as_matrix else dim, tiled=True)
    return jnp.moveaxis(x.reshape(-1, *others), 0, dim) if as_matrix else x


def summed(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum of x (...) over the devices along these axes: a psum, or x itself without axes."""
    return jax.lax.psum(x, axes) if axes else x
