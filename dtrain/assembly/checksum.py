"""Whether a state is finite, and a checksum of its bits, both computed on the devices that hold it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.assembly.state import State
from dtrain.core.errors import NotFinite
from dtrain.models.nn.param import Tree, dotted

Checksum = tuple[int, int]


@dataclass(frozen=True)
class StateChecksum:
    """Result of `state_checksum`; the arrays may still be pending on the devices."""

    step: int
    finite: Any
    """For each array whether all of its values are finite: bool ()."""
    sums: Any
    """For each array its two sums: uint32 (2,). They do not depend on how it is sharded."""
    names: tuple[str, ...]
    """Dotted path of each array."""

    def checksum(self) -> Checksum:
        """Wait for the devices and return the two sums. Raises NotFinite with the first array that is not finite."""
        finite, sums = jax.device_get((self.finite, self.sums))
        bad = [name for name, good in zip(self.names, finite, strict=True) if not good]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise NotFinite(f"the state of step {self.step} is not finite: {bad[0]}{more}; it is not saved")
        return _joined(sums)


def state_checksum(step: int, state: State) -> StateChecksum:
    """Start to compute the checksum of a state. The state may be donated as soon as this returns."""
    found = _each(state, state.step.sharding)
    names = tuple(dotted(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0])
    return StateChecksum(step, [finite for finite, _ in found], [sums for _, sums in found], names)


def values_checksum(values: Tree, replicated: jax.sharding.Sharding) -> Checksum:
    """The checksum of arrays on the devices, whether they are finite or not."""
    return _joined(jax.device_get([sums for _, sums in _each(values, replicated)]))


def _each(tree: Tree, replicated: jax.sharding.Sharding) -> list[tuple[jax.Array, jax.Array]]:
    """Of each array whether it is finite, and its sums, on all devices.

    One small program for each shape: the time to compile one for all arrays grows faster than their square.
    """
    one = jax.jit(_checked, out_shardings=replicated)
    return [one(leaf) for leaf in jax.tree.leaves(tree)]


def _checked(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    finite = jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.array(True)
    return finite, _sums(x)


def _joined(sums: Sequence[Any]) -> Checksum:
    """The checksum of several arrays: a polynomial in 31 of the sums of each, modulo 2^32."""
    total = [0, 0]
    for own in sums:
        total = [(old * 31 + int(new)) % 2**32 for old, new in zip(total, own, strict=True)]
    return total[0], total[1]


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
