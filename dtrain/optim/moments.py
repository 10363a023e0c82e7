"""Second moments of gradients: Adam's, and Adafactor's, which are factored into rows and columns of each matrix."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from dtrain.models.nn.param import Param, Tree

if TYPE_CHECKING:
    import optax

APART = ("layer", "experts")
"""Dims along which a parameter is a stack of matrices with separate moments."""

TINY = 1e-30
"""Added to squared gradients: epsilon_1 of Shazeer & Stern 2018, algorithm 4."""


def adam(b1: float, b2: float, epsilon: float) -> "optax.GradientTransformation":
    """Adam's direction (Kingma & Ba 2015, algorithm 1): optax's `scale_by_adam` with an exact bias correction."""
    import optax

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        count = jnp.asarray(optax.safe_increment(state.count))
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, updates)
        first, second = correction(b1, count), correction(b2, count)
        direction = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + epsilon), mu, nu)
        return direction, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(optax.scale_by_adam(b1, b2, epsilon).init, update)


def correction(decay: float, count: jax.Array) -> jax.Array:
    """1 - decay ** count, as -expm1(count x log(decay)).

    In float32, 0.999 ** count is 1.3e-5 off, and its difference from 1 far more; expm1 does not lose those digits.
    """
    return -jnp.expm1(count.astype(jnp.float32) * (math.log(decay) if decay else -jnp.inf))


class Factored(NamedTuple):
    """Running averages of squared gradients: of the means by row and by column of each matrix, or of every value."""

    count: Any
    rows: Tree
    columns: Tree
    whole: Tree

    def dims(self, declared: Tree, factor_from: Callable[[Param], int]) -> "Factored":
        """The dim names of each array, from which its sharding follows. The state may be of some parameters only."""

        def name(which: str, arrays: Tree) -> Any:
            def one(param: Param, array: Any) -> str | None:
                return None if array is None else " ".join(param_names(Matrix(param, factor_from(param)), which))

            return jax.tree.map(one, declared, arrays)

        return Factored("", name("rows", self.rows), name("columns", self.columns), name("whole", self.whole))


class Matrix:
    """A parameter as a stack of matrices: which of its dims are rows, which are columns."""

    def __init__(self, param: Param, factor_from: int) -> None:
        names = list(enumerate(param.names))
        self.param, self.apart = param, [i for i, name in names if name in APART]
        inside = [i for i, _ in names if i not in self.apart]
        rows = [i for i in inside if param.names[i] in param.fan_in] or inside[:-1]
        self.rows, self.columns = rows, [i for i in inside if i not in rows]
        sizes = [math.prod(param.shape[i] for i in part) for part in (self.rows, self.columns)]
        self.factored = bool(self.rows and self.columns) and min(sizes) >= factor_from

    def mean(self, x: jax.Array, dims: list[int]) -> jax.Array:
        """The mean of x (a parameter's shape) over some dims, which stay with size one; padding, which is zero, is not
        counted."""
        used = self.param.unpadded or self.param.shape
        return x.sum(dims, keepdims=True) / math.prod(used[i] for i in dims if x.shape[i] > 1)


def factored(declared: Tree, factor_from: int, decay: float = 0.8) -> "optax.GradientTransformation":
    """Adafactor's direction (Shazeer & Stern 2018): gradients over the root of their factored mean squares.

    `decay` is the exponent of the decay rate at step t, 1 - t ** -decay (section 7.2). Each update is clipped to unit
    RMS (section 6). Matrices with fewer rows or columns than `factor_from` are not factored.
    """
    import optax

    plan = jax.tree.map(lambda param: Matrix(param, factor_from), declared)

    def shapes(which: str) -> Callable[[Matrix], jax.Array]:
        return lambda m: jnp.zeros([m.param.shape[i] for i in factored_dims(m, which)] or [1], jnp.float32)

    def init(params: Tree) -> Any:
        parts = (jax.tree.map(shapes(which), plan) for which in ("rows", "columns", "whole"))
        return Factored(jnp.zeros((), jnp.int32), *parts)

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        beta = 1.0 - (state.count.astype(jnp.float32) + 1) ** -decay
        steps = jax.tree.map(
            lambda m, g, *moments: _step(m, g, beta, *moments), plan, updates, state.rows, state.columns, state.whole
        )
        parts = [jax.tree.map(lambda _, step, i=i: step[i], plan, steps) for i in range(4)]
        return parts[0], Factored(optax.safe_increment(state.count), *parts[1:])

    return optax.GradientTransformation(init, update)


def _step(
    m: Matrix, g: jax.Array, beta: jax.Array, rows: jax.Array, columns: jax.Array, whole: jax.Array
) -> tuple[jax.Array, ...]:
    """The clipped update of one parameter, and its new moments."""
    squared = jnp.square(g.astype(jnp.float32)) + TINY
    if m.factored:
        # V = R C / mean(R), with R the means by row and C those by column (algorithm 4; sums there, means here)
        by_row, by_column = m.mean(squared, m.columns), m.mean(squared, m.rows)
        rows = beta * rows + (1 - beta) * by_row.reshape(rows.shape)
        columns = beta * columns + (1 - beta) * by_column.reshape(columns.shape)
        row, column = rows.reshape(by_row.shape), columns.reshape(by_column.shape)
        update = g * jax.lax.rsqrt(row / m.mean(row, m.rows)) * jax.lax.rsqrt(column)
    else:
        whole = beta * whole + (1 - beta) * squared
        update = g * jax.lax.rsqrt(whole)
    rms = jnp.sqrt(m.mean(jnp.square(update), [*m.rows, *m.columns]))
    return update / jnp.maximum(1.0, rms), rows, columns, whole


def factored_dims(m: Matrix, which: str) -> list[int]:
    """The dims of a parameter that one of its moment arrays has; none if that array is a placeholder."""
    if (which == "whole") == m.factored:
        return []
    return sorted([*m.apart, *(m.rows + m.columns if which == "whole" else m.rows if which == "rows" else m.columns)])


def param_names(m: Matrix, which: str) -> list[str]:
    """The names of those dims; `_` for a placeholder."""
    return [m.param.names[i] for i in factored_dims(m, which)] or ["_"]
