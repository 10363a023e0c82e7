"""Products of activations with matrices in int8, and their gradients.

Each row of x and each column of w has a scale, the largest value over the summed dim (LLM.int8, Dettmers et al. 2022,
section 2), so that x w = sx (qx qw) sw. The gradients use the same qx and qw again. Only the gradient g of the result
is rounded, twice, with the other operand's scales multiplied in:

  dx = g w^T = (g sw) qw^T, with a scale for each row of (g sw)
  dw = x^T g = qx^T (sx g), with a scale for each column of (sx g)

Under shard_map the largest values are those of a device's part: a product that is split over devices has a scale for
each part.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LARGEST = 127
MOST = (2**31 - 1) // LARGEST**2
"""Most products in a sum: more could overflow int32."""


class Scaled(NamedTuple):
    """Whole numbers as int8, and their scales: one for all values along the dims that are summed; float32."""

    values: jax.Array
    scale: jax.Array


def scaled(x: jax.Array, dims: tuple[int, ...], on_tpu: bool) -> Scaled:
    """x, with a scale for all values along `dims`, which keep size 1 there. Where x is not finite, its scale is not."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=dims, keepdims=True)
    if not on_tpu:  # a maximum of XLA:CPU may leave out NaN; a sum does not
        largest = largest + 0 * jnp.sum(wide, axis=dims, keepdims=True)
    scale = jnp.where(largest < LARGEST * jnp.finfo(jnp.float32).tiny, 1.0, largest / LARGEST)
    return Scaled(jnp.round(wide / scale).astype(jnp.int8), scale)


def _across(columns: Scaled, dims: int) -> jax.Array:
    """The scales of the columns of a matrix, along the last of so many dims."""
    return columns.scale.reshape(*[1] * (dims - 1), -1)


def _dot(a: jax.Array, b: jax.Array, dims: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    return jax.lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.int32).astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def int8_matmul(x: jax.Array, w: jax.Array, dtype: str, on_tpu: bool) -> jax.Array:
    """x (..., E) times w (E, F): (..., F), rounded to `dtype`. E, and F, over which the gradient of x is summed, are at
    most MOST."""
    return _forward(x, w, dtype, on_tpu)[0]


def _forward(x: jax.Array, w: jax.Array, dtype: str, on_tpu: bool) -> tuple[jax.Array, Any]:
    last = x.ndim - 1
    own, other = scaled(x, (last,), on_tpu), scaled(w, (0,), on_tpu)
    out = _dot(own.values, other.values, ((last,), (0,))) * own.scale * _across(other, x.ndim)
    return out.astype(dtype), (own, other, jnp.zeros((), x.dtype), jnp.zeros((), w.dtype))


def _backward(_: str, on_tpu: bool, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    own, other, like_x, like_w = saved
    last, rows = g.ndim - 1, tuple(range(g.ndim - 1))
    wide = g.astype(jnp.float32)
    left = scaled(wide * _across(other, g.ndim), (last,), on_tpu)
    of_x = _dot(left.values, other.values, ((last,), (1,))) * left.scale
    if math.prod(g.shape[:-1]) > MOST:  # of this device under shard_map, of all under jit
        x = (own.values.astype(jnp.float32) * own.scale).astype(like_x.dtype)
        dims = ((rows, rows), ((), ()))
        of_w = jax.lax.dot_general(x, g.astype(x.dtype), dims, preferred_element_type=jnp.float32)
    else:
        right = scaled(wide * own.scale, rows, on_tpu)
        of_w = _dot(own.values, right.values, (rows, rows)) * right.scale.reshape(1, -1)
    return of_x.astype(like_x.dtype), of_w.astype(like_w.dtype)


int8_matmul.defvjp(_forward, _backward)
