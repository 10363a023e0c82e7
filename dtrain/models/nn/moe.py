"""A mixture of experts on one device: rows sorted by expert, one grouped product for all of them.

Dims: N tokens, K experts chosen by each, E embed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.models.nn.param import Tree
from dtrain.models.nn.remat import PRODUCT

Product = Callable[[jax.Array, jax.Array], jax.Array]
"""(rows sorted by expert (N, in), a matrix for each expert (experts, in, out)) → rows (N, out)."""

Apply = Callable[[Tree, jax.Array, jax.Array, Product], jax.Array]
"""(experts' parameters, rows sorted by expert, their gates (N, 1), the product of rows with their expert's
matrix) → weighed rows. Gates that act before the last matrix spare its result in the backward pass."""


class Routing(NamedTuple):
    """Tokens (..., embed), the numbers of the experts that each chose (..., K), and the gates of those."""

    x: jax.Array
    chosen: jax.Array
    gates: jax.Array

    @property
    def rows(self) -> "Routing":
        """The same with one leading dim: (N, ...)."""
        return Routing(*(part.reshape(-1, part.shape[-1]) for part in self))


@dataclass(frozen=True)
class ExpertWeights:
    """The experts at hand and how rows go through them."""

    params: Tree
    """Each matrix (experts, ...)."""
    dims: Tree
    """The names of each matrix's dims."""
    apply: Apply
    product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = jax.lax.ragged_dot
    """(rows, matrices, rows of each expert) → rows: the program that the platform has for it."""
    most: int | None = None
    """Tokens of one row that one expert takes at most, where that is bounded: those beyond have no expert's number."""

    @property
    def count(self) -> int:
        """Experts at hand."""
        return jax.tree.leaves(self.params)[0].shape[0]


def grouped(tokens: Routing, experts: ExpertWeights) -> jax.Array:
    """Every token through each expert it chose, weighed by its gates: (..., embed); no token is dropped."""
    x_NE, chosen_NK, gates_NK = tokens.rows
    out = in_order(jnp.repeat(x_NE, chosen_NK.shape[1], 0), gates_NK.reshape(-1), chosen_NK.reshape(-1), experts)
    return out.reshape(*chosen_NK.shape, -1).sum(1).reshape(tokens.x.shape)


def in_order(rows: jax.Array, gates: jax.Array, expert: jax.Array, experts: ExpertWeights) -> jax.Array:
    """Each row, times its gate, through the expert of that number; where that is the experts' count, zeros."""
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.zeros(experts.count, jnp.int32).at[expert].add(1, mode="drop")

    def times(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return checkpoint_name(experts.product(rows, matrices, sizes), PRODUCT)

    out = experts.apply(experts.params, rows[order], gates[order, None], times)[jnp.argsort(order)]
    return jnp.where((expert < experts.count)[:, None], out, 0)
