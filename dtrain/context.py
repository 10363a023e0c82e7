"""What a model may ask of the layout. It names no device, mesh axis or engine.

On one device each verb is the plain thing, which is what `Plain` does; under an engine the same
verbs are sharding constraints (`jit`) or collectives placed by hand (`shard_map`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax

from dtrain.params import Tree

Block = Callable[[Tree, jax.Array], jax.Array]
"""(parameters of one layer, activations) → activations."""


class Context(Protocol):
    """The verbs. Dims are named as in `Param.dims`; `None` is a dim that stays whole."""

    @property
    def loss_dtype(self) -> str:
        """The dtype in which losses are computed."""
        ...

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """x, laid out by the names of its dims."""
        ...

    def gather(self, params: Tree) -> Tree:
        """The parameters made whole where they are split only to save memory."""
        ...

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        """The full sum, where x was summed over this device's share of `dim`."""
        ...

    def attend(self, q_BTHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array) -> jax.Array:
        """Attention of every position to every position, heads apart."""
        ...

    def stack(self, block: Block, params: Tree, x: jax.Array) -> jax.Array:
        """x through equal blocks whose parameters are stacked along a leading `layer` dim."""
        ...


@dataclass(frozen=True)
class Plain:
    """One device: nothing is split."""

    loss_dtype: str = "float32"

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        return x

    def gather(self, params: Tree) -> Tree:
        return params

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        return x

    def attend(self, q_BTHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array) -> jax.Array:
        return dense_attention(q_BTHD, k_BTHD, v_BTHD)

    def stack(self, block: Block, params: Tree, x: jax.Array) -> jax.Array:
        return scan_layers(block, params, x)


def dense_attention(q_BTHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array) -> jax.Array:
    """Softmax attention with every score in memory at once."""
    return jax.nn.dot_product_attention(q_BTHD, k_BTHD, v_BTHD, implementation="xla")


def scan_layers(block: Block, params: Tree, x: jax.Array) -> jax.Array:
    """One compiled block, applied to each layer in turn."""
    out, _ = jax.lax.scan(lambda carry, layer: (block(layer, carry), None), x, params)
    return out
