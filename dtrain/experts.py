"""A mixture of experts on one device: rows sorted by expert, one grouped product for all of them.

Dims: N tokens, K experts chosen by each, E embed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dtrain.params import Tree

Apply = Callable[[Tree, jax.Array, jax.Array], jax.Array]
"""(experts' parameters, rows sorted by expert, rows of each expert) → rows."""


def grouped(x_NE: jax.Array, chosen_NK: jax.Array, gates_NK: jax.Array, experts: Tree, apply: Apply) -> jax.Array:
    """Every token through each expert it chose, weighed by its gates; no token is dropped."""
    tokens, active = chosen_NK.shape
    count = jax.tree.leaves(experts)[0].shape[0]
    out = in_order(jnp.repeat(x_NE, active, 0), chosen_NK.reshape(-1), count, experts, apply)
    return combine(out.reshape(tokens, active, -1), gates_NK)


def in_order(rows: jax.Array, expert: jax.Array, count: int, experts: Tree, apply: Apply) -> jax.Array:
    """Each row through the expert of that number; a row whose number is `count` gives zeros."""
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.zeros(count, jnp.int32).at[expert].add(1, mode="drop")
    out = apply(experts, rows[order], sizes)[jnp.argsort(order)]
    return jnp.where((expert < count)[:, None], out, 0)


def combine(out_NKE: jax.Array, gates_NK: jax.Array) -> jax.Array:
    """The sum of each token's experts, weighed."""
    return jnp.einsum("NKE,NK->NE", out_NKE, gates_NK.astype(out_NKE.dtype))
