"""Which number format serves what."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dtrain.fields import DType
from dtrain.params import Tree


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Parameters are kept in one dtype, computed with in another, and losses summed in a third."""

    params: DType = "float32"
    compute: DType = "float32"
    loss: DType = "float32"

    def cast(self, tree: Tree) -> Tree:
        """Floating-point arrays in the compute dtype; all others as they are."""

        def one(x: jax.Array) -> jax.Array:
            return x.astype(self.compute) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(one, tree)
