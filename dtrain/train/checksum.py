"""Whether a state is finite, and a checksum of its bits, computed where it lies."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.core.errors import NotFinite
from dtrain.models.nn.param import dotted
from dtrain.train.state import State

Checksum = tuple[int, int]


@dataclass(frozen=True)
class StateChecksum:
    """What is known of a state once the devices are done with it."""

    step: int
    finite: Any
    """bool (leaves,)."""
    sums: Any
    """uint32 (2,). The same however the state is spread over devices."""
    names: tuple[str, ...]

    def checksum(self) -> Checksum:
        """Waits for the devices. NotFinite names the arrays that are not finite."""
        finite, sums = jax.device_get((self.finite, self.sums))
        if not finite.all():
            bad = [name for name, good in zip(self.names, finite, strict=True) if not good]
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise NotFinite(f"the state of step {self.step} is not finite: {bad[0]}{more}; it is not saved")
        return int(sums[0]), int(sums[1])


def state_checksum(step: int, state: State) -> StateChecksum:
    """Begin to look at a state; the state may be given away as soon as this returns."""
    finite, sums = jax.jit(_checksummed, out_shardings=state.step.sharding)(state)
    return StateChecksum(
        step, finite, sums, tuple(dotted(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0])
    )


def _checksummed(state: State) -> tuple[jax.Array, jax.Array]:
    leaves = jax.tree.leaves(state)
    total = jnp.zeros(2, jnp.uint32)
    for leaf in leaves:
        total = total * jnp.uint32(31) + _sums(leaf)
    floats = [jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.array(True) for x in leaves]
    return jnp.stack(floats), total


@jax.jit  # traced once for all arrays of a shape
def _sums(x: jax.Array) -> jax.Array:
    """Two sums modulo 2^32 over the words of an array, each word with its place: uint32 (2,).

    The first has odd factors, so that no single bit can change unseen; the second mixes (the finalizer
    of MurmurHash3), so that changes do not cancel out.
    """
    bits = x if x.dtype == jnp.bool else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    words = bits.astype(jnp.uint32)
    place, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for dim in reversed(range(x.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= x.shape[dim]
    mixed = words ^ place * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ mixed >> 16) * jnp.uint32(0x85EBCA6B)
    mixed = mixed ^ mixed >> 13
    return jnp.stack([jnp.sum(words * (place * 2 + 1), dtype=jnp.uint32), jnp.sum(mixed, dtype=jnp.uint32)])
