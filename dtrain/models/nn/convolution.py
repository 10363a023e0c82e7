"""Convolutions and maxima over windows of images, as the networks of images use them.

Dims: B batch, H height, W width, C channels. A kernel is (height, width, channels in, channels out).
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from dtrain.models.nn.low_rank import merged
from dtrain.models.nn.param import Tree
from dtrain.models.nn.vma import axes_of, varied, vary

KERNEL = 3
Padding = str | tuple[tuple[int, int], tuple[int, int]]
"""SAME: as many positions as the input has, divided by the stride; or pixels before and after, of height and width."""


def largest(x_BHWC: jax.Array, padding: Padding = "SAME") -> jax.Array:
    """The maximum of each 3 x 3 window, with stride 2."""
    pads = padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0))
    return jax.lax.reduce_window(x_BHWC, -jnp.inf, jax.lax.max, (1, KERNEL, KERNEL, 1), (1, 2, 2, 1), pads)


def conv(x_BHWC: jax.Array, kernel: jax.Array, stride: int = 1, padding: Padding = "SAME") -> jax.Array:
    """The convolution of images and a kernel, which low-rank adapters may have; on a mesh, the gradient of the kernel
    is summed over the devices that hold other examples."""
    kernel = merged(kernel)
    return _convolved(vary(x_BHWC, axes_of(kernel)), varied(kernel, axes_of(x_BHWC)), stride, padding)


def _plain(x_BHWC: jax.Array, kernel: jax.Array, stride: int, padding: str | Sequence[tuple[int, int]]) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x_BHWC, kernel, (stride, stride), padding, dimension_numbers=layout)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolved(x_BHWC: jax.Array, kernel: jax.Array, stride: int, padding: Padding) -> jax.Array:
    return _plain(x_BHWC, kernel, stride, padding)


def _convolved_forward(x_BHWC: jax.Array, kernel: jax.Array, stride: int, padding: Padding) -> tuple[jax.Array, Tree]:
    return _plain(x_BHWC, kernel, stride, padding), (x_BHWC, kernel)


def _convolved_backward(stride: int, padding: Padding, saved: Tree, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of input and kernel; the kernel's in float32, since the compiler sums it over the devices that hold
    other examples before it is rounded."""
    x_BHWC, kernel = saved
    x32, kernel32 = x_BHWC.astype(jnp.float32), kernel.astype(jnp.float32)
    (of_x,) = jax.vjp(lambda x: _plain(x, kernel, stride, padding), x_BHWC)[1](gradient)
    of_kernel_in_float32 = jax.vjp(lambda kernel: _plain(x32, kernel, stride, padding), kernel32)[1]
    (of_kernel,) = of_kernel_in_float32(gradient.astype(jnp.float32))
    return of_x, of_kernel.astype(kernel.dtype)


_convolved.defvjp(_convolved_forward, _convolved_backward)
