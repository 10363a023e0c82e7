"""Products of activations with matrices in 8 bits, and their gradients.

Each row of x and each column of w has a scale, by its largest value over the summed dim (LLM.int8, Dettmers et al.
2022, section 2), so that x w = sx (qx qw) sw. The gradients use the same qx and qw again. Only the gradient g of the
result is rounded, twice, with the other operand's scales multiplied in:

  dx = g w^T = (g sw) qw^T, with a scale for each row of (g sw)
  dw = x^T g = qx^T (sx g), with a scale for each column of (sx g)

Under shard_map the largest values are those of a device's part: a product that is split over devices has a scale for
each part.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Format:
    """Numbers of 8 bits: the largest, the dtype of sums, and the most products in a sum, for which it has room."""

    dtype: str
    largest: int
    sums: str
    most: float = math.inf

    def scale(self, largest: jax.Array) -> jax.Array:
        """That of values of which `largest` is the largest."""
        scale = jnp.where(largest < self.largest * jnp.finfo(jnp.float32).tiny, 1.0, largest / self.largest)
        if self.dtype == "int8":
            return scale
        # The next power of two: values then round alike with any scale, so that parts of a product on several devices
        # round as the whole does. A float32 is one if its mantissa, the lowest 23 bits, is zero.
        mantissa = jnp.int32(2**23 - 1)
        power = (jax.lax.bitcast_convert_type(scale, jnp.int32) + mantissa) & ~mantissa
        return jnp.where(jnp.isfinite(scale), jax.lax.bitcast_convert_type(power, jnp.float32), scale)

    def rounded(self, x: jax.Array) -> jax.Array:
        """x, which is within the range, in the format, as the bits of int8: rematerialisation rounds floating-point
        values that it saves by `reduce_precision`, which makes infinities of those of e4m3 above 240."""
        if self.dtype == "int8":
            return jnp.round(x).astype(jnp.int8)
        return jax.lax.bitcast_convert_type(x.astype(self.dtype), jnp.int8)

    def values(self, bits: jax.Array) -> jax.Array:
        """What `rounded` has as bits."""
        return jax.lax.bitcast_convert_type(bits, self.dtype)


INT8_LARGEST = 127
FORMATS = {
    "int8": Format("int8", INT8_LARGEST, "int32", (2**31 - 1) // INT8_LARGEST**2),
    "fp8": Format("float8_e4m3fn", 448, "float32"),
}
"""By the name in `precision.matmul`. fp8: four bits of exponent and three of mantissa also for gradients, which their
own scales bring into its range (Micikevicius et al. 2022; row-wise scales as in torchao)."""


class Scaled(NamedTuple):
    """Values in a format, as int8, and their scales: one for all values along the dims that are summed; float32."""

    bits: jax.Array
    scale: jax.Array


def scaled(x: jax.Array, dims: tuple[int, ...], to: Format, on_tpu: bool) -> Scaled:
    """x, with a scale for all values along `dims`, which keep size 1 there. Where x is not finite, its scale is not."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=dims, keepdims=True)
    if not on_tpu:  # a maximum of XLA:CPU may leave out NaN; a sum does not
        largest = largest + 0 * jnp.sum(wide, axis=dims, keepdims=True)
    scale = to.scale(largest)
    return Scaled(to.rounded(wide / scale), scale)


def _across(columns: Scaled, dims: int) -> jax.Array:
    """The scales of the columns of a matrix, along the last of so many dims."""
    return columns.scale.reshape(*[1] * (dims - 1), -1)


def _dot(
    a: jax.Array, b: jax.Array, dims: tuple[tuple[int, ...], tuple[int, ...]], to: Format, *, exact: bool = False
) -> jax.Array:
    """The product, float32. `exact`: GPUs sum products of fp8 in fewer bits unless they are asked for precision."""
    precision = jax.lax.Precision.HIGHEST if exact and to.sums == "float32" else None
    values, sums = (to.values(a), to.values(b)), to.sums
    found = jax.lax.dot_general(*values, (dims, ((), ())), precision=precision, preferred_element_type=sums)
    return found.astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def narrow_matmul(x: jax.Array, w: jax.Array, to: Format, dtype: str, on_tpu: bool) -> jax.Array:
    """x (..., E) times w (E, F): (..., F), rounded to `dtype`. E, and F, over which the gradient of x is summed, are at
    most `to.most`."""
    return _forward(x, w, to, dtype, on_tpu)[0]


def _forward(x: jax.Array, w: jax.Array, to: Format, dtype: str, on_tpu: bool) -> tuple[jax.Array, Any]:
    last = x.ndim - 1
    own, other = scaled(x, (last,), to, on_tpu), scaled(w, (0,), to, on_tpu)
    out = _dot(own.bits, other.bits, ((last,), (0,)), to) * own.scale * _across(other, x.ndim)
    return out.astype(dtype), (own, other, jnp.zeros((), x.dtype), jnp.zeros((), w.dtype))


def _backward(to: Format, _: str, on_tpu: bool, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    own, other, like_x, like_w = saved
    last, rows = g.ndim - 1, tuple(range(g.ndim - 1))
    wide = g.astype(jnp.float32)
    left = scaled(wide * _across(other, g.ndim), (last,), to, on_tpu)
    of_x = _dot(left.bits, other.bits, ((last,), (1,)), to, exact=not on_tpu) * left.scale
    if math.prod(g.shape[:-1]) > to.most:  # of this device under shard_map, of all under jit
        x = (to.values(own.bits).astype(jnp.float32) * own.scale).astype(like_x.dtype)
        dims = ((rows, rows), ((), ()))
        of_w = jax.lax.dot_general(x, g.astype(x.dtype), dims, preferred_element_type=jnp.float32)
    else:
        right = scaled(wide * own.scale, rows, to, on_tpu)
        of_w = _dot(own.bits, right.bits, (rows, rows), to, exact=not on_tpu) * right.scale.reshape(1, -1)
    return of_x.astype(like_x.dtype), of_w.astype(like_w.dtype)


narrow_matmul.defvjp(_forward, _backward)
