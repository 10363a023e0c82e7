"""A mixture of experts on one device: rows are sorted by expert and multiplied in one grouped product.

Dims: N tokens, K experts chosen by each token, E embed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.models.nn.param import Tree


class Product(Protocol):
    """The product of rows with the matrix of their expert."""

    def __call__(self, rows: jax.Array, matrices: jax.Array, name: str, bias: jax.Array | None = None, /) -> jax.Array:
        """Rows (N, out), from rows sorted by expert (N, in), a matrix for each expert (experts, in, out), the name of
        the result for rematerialisation policies, and a bias for each expert (experts, out)."""
        ...


Apply = Callable[[Tree, jax.Array, jax.Array, Product], jax.Array]
"""(experts' parameters, rows sorted by expert, their gates (N, 1), the product of rows with their expert's
matrix) → weighted rows. If gates multiply before the last matrix, its result is not needed in the backward pass."""


class Routing(NamedTuple):
    """Tokens (..., embed), the numbers of each token's experts (..., K), and their gates (..., K)."""

    x: jax.Array
    chosen: jax.Array
    gates: jax.Array

    @property
    def rows(self) -> "Routing":
        """The same with one leading dim: (N, ...)."""
        return Routing(*(part.reshape(-1, part.shape[-1]) for part in self))


@dataclass(frozen=True)
class ExpertWeights:
    """This device's experts and how rows are computed with them."""

    params: Tree
    """Each matrix (experts, ...)."""
    dims: Tree
    """The dim names of each matrix."""
    apply: Apply
    product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = jax.lax.ragged_dot
    """(rows, matrices, number of rows of each expert) → rows: the platform's grouped matrix product."""
    most: int | None = None
    """Capacity: most tokens of a row that an expert takes; None: no limit. Choices beyond it have no valid number."""

    @property
    def count(self) -> int:
        """Number of experts on this device."""
        return jax.tree.leaves(self.params)[0].shape[0]


def grouped(tokens: Routing, experts: ExpertWeights) -> jax.Array:
    """Each token through its experts, weighted by its gates and summed: (..., embed). No token is dropped here."""
    x_NE, chosen_NK, gates_NK = tokens.rows
    out = in_order(jnp.repeat(x_NE, chosen_NK.shape[1], 0), gates_NK.reshape(-1), chosen_NK.reshape(-1), experts)
    return out.reshape(*chosen_NK.shape, -1).sum(1).reshape(tokens.x.shape)


def in_order(rows: jax.Array, gates: jax.Array, expert: jax.Array, experts: ExpertWeights) -> jax.Array:
    """Each row through the expert of its number, weighted by its gate: (N, embed).

    A row whose number is not below the number of experts gives zeros. `argsort` of the sorting order undoes it.
    """
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.zeros(experts.count, jnp.int32).at[expert].add(1, mode="drop")

    def times(rows: jax.Array, matrices: jax.Array, name: str, bias: jax.Array | None = None) -> jax.Array:
        out = experts.product(rows, matrices, sizes)
        if bias is not None:
            # a product, whose gradient is one too: that of a lookup would be summed row by row
            onto_NX = jax.nn.one_hot(expert[order], experts.count, dtype=rows.dtype)
            out = out + jnp.matmul(onto_NX, bias.astype(rows.dtype), precision="highest")
        return checkpoint_name(out, name)

    out = experts.apply(experts.params, rows[order], gates[order, None], times)[jnp.argsort(order)]
    return jnp.where((expert < experts.count)[:, None], out, 0)
