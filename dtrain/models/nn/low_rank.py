"""A matrix plus a product of two thin ones, W + scale x A B, without computing the sum (Hu et al. 2021, 4.1)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.models.nn.quantised import is_quantised


@partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"])
@dataclass(frozen=True)
class LowRank:
    """`base` (*batch, *inner, *outer), `a` (*batch, *inner, rank), `b` (*batch, rank, *outer).

    `matmul` multiplies by each of them, so that no array of the base's size is computed, nor a gradient of it.
    """

    base: Any
    """An array, or a `Quantised` matrix."""
    a: jax.Array
    b: jax.Array
    scale: float

    def merged(self) -> jax.Array:
        """The sum as one array, computed in float32, in the dtype of the base."""
        base = self.base.wide() if is_quantised(self.base) else self.base
        batch = self.a.ndim + self.b.ndim - 2 - base.ndim  # the dims that all three have
        shape, rank = base.shape, self.a.shape[-1]
        a = self.a.reshape(*shape[:batch], -1, rank).astype(jnp.float32)
        b = self.b.reshape(*shape[:batch], rank, -1).astype(jnp.float32)
        delta = jnp.matmul(a, b, precision="highest").reshape(shape)
        return (base.astype(jnp.float32) + self.scale * delta).astype(base.dtype)


def merged(tree: Any) -> Any:
    """The tree with an array in place of each such sum, and of each quantised matrix."""

    def array(leaf: Any) -> Any:
        if isinstance(leaf, LowRank):
            return leaf.merged()
        return leaf.wide() if is_quantised(leaf) else leaf

    return jax.tree.map(array, tree, is_leaf=lambda leaf: isinstance(leaf, LowRank) or is_quantised(leaf))


def inner_dims(shape: tuple[int, ...], names: tuple[str, ...], fan_in: tuple[str, ...]) -> tuple[int, int]:
    """(batch, inner): how many leading dims of a parameter are of stacked layers, and how many after them are summed.

    Without `fan_in` all dims but the last are summed. (0, 0) if the dims have another order, or if there are too few.
    """
    batch = next((i for i, name in enumerate(names) if name != "layer"), 0)
    if not fan_in:
        return (batch, len(shape) - batch - 1) if len(shape) - batch > 1 else (0, 0)
    inner = next((i for i, name in enumerate(names[batch:]) if name not in fan_in), 0)
    rest = names[batch + inner :]
    return (batch, inner) if inner and rest and not set(rest) & (set(fan_in) - {"_"}) else (0, 0)
