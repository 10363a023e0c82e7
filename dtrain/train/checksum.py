"""Whether a state is finite, and a checksum of its bits, both computed on the devices that hold it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.core.errors import NotFinite
from dtrain.models.nn.param import Tree, dotted
from dtrain.train.state import State

Checksum = tuple[int, int]


@dataclass(frozen=True)
class StateChecksum:
    """Result of `state_checksum`; the arrays may still be pending on the devices."""

    step: int
    finite: Any
    """bool (leaves,): whether all values of each array are finite."""
    sums: Any
    """uint32 (2,): the checksum. It does not depend on how the state is sharded."""
    names: tuple[str, ...]
    """Dotted path of each array."""

    def checksum(self) -> Checksum:
        """Wait for the devices and return the two sums. Raises NotFinite with the first array that is not finite."""
        finite, sums = jax.device_get((self.finite, self.sums))
        if not finite.all():
            bad = [name for name, good in zip(self.names, finite, strict=True) if not good]
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise NotFinite(f"the state of step {self.step} is not finite: {bad[0]}{more}; it is not saved")
        return int(sums[0]), int(sums[1])


def state_checksum(step: int, state: State) -> StateChecksum:
    """Start to compute the checksum of a state. The state may be donated as soon as this returns."""
    finite, sums = jax.jit(_checksummed, out_shardings=state.step.sharding)(state)
    return StateChecksum(
        step, finite, sums, tuple(dotted(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0])
    )


def values_checksum(values: Tree, replicated: jax.sharding.Sharding) -> Checksum:
    """The checksum of arrays on the devices, whether they are finite or not."""
    sums = jax.device_get(jax.jit(lambda tree: _checksummed(tree)[1], out_shardings=replicated)(values))
    return int(sums[0]), int(sums[1])


def _checksummed(state: Tree) -> tuple[jax.Array, jax.Array]:
    leaves = jax.tree.leaves(state)
    total = jnp.zeros(2, jnp.uint32)
    for leaf in leaves:
        total = total * jnp.uint32(31) + _sums(leaf)
    floats = [jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.array(True) for x in leaves]
    return jnp.stack(floats), total


@jax.jit  # traced once for all arrays of a shape
def _sums(x: jax.Array) -> jax.Array:
    """Two sums modulo 2^32 over the words of an array, each combined with its flat index: uint32 (2,).

    The first multiplies each word by an odd number, which is invertible modulo 2^32, so a change of one word always
    changes the sum. The second mixes word and index (finalizer of MurmurHash3), so changes of several words do not
    cancel.
    """
    bits = x if x.dtype == jnp.bool else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    words = bits.astype(jnp.uint32)
    index, stride = jnp.zeros(x.shape, jnp.uint32), 1  # the index in the whole array, whatever its sharding
    for dim in reversed(range(x.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= x.shape[dim]
    mixed = words ^ index * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ mixed >> 16) * jnp.uint32(0x85EBCA6B)
    mixed = mixed ^ mixed >> 13
    return jnp.stack([jnp.sum(words * (index * 2 + 1), dtype=jnp.uint32), jnp.sum(mixed, dtype=jnp.uint32)])
