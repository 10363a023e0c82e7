"""Convolutions and attention for both stages, as plain functions of parameters."""

from typing import Any

import jax
import jax.numpy as jnp


def conv(key: Any, size: int, inputs: int, outputs: int, gain: float = 1.0) -> Any:
    """The parameters of a convolution of size x size."""
    kernel = jax.random.normal(key, (size, size, inputs, outputs)) * gain * (size * size * inputs) ** -0.5
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def convolved(p: Any, x: Any, stride: int = 1) -> Any:
    """x (B, H, W, inputs) to (B, H / stride, W / stride, outputs)."""
    names = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, p["kernel"], (stride, stride), "SAME", dimension_numbers=names)
    return (x + p["bias"][None, None, None]).astype(x.dtype)


def residual(key: Any, width: int) -> Any:
    first, second = jax.random.split(key)
    return [conv(first, 3, width, width), conv(second, 3, width, width, 0.3)]


def added(p: Any, x: Any) -> Any:
    """A residual block of two convolutions."""
    return x + convolved(p[1], jax.nn.silu(convolved(p[0], jax.nn.silu(x))))


def larger(x: Any) -> Any:
    """Each pixel four times."""
    return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)


def dense(key: Any, inputs: int, outputs: int, gain: float = 1.0) -> Any:
    return {"kernel": jax.random.normal(key, (inputs, outputs)) * gain * inputs**-0.5, "bias": jnp.zeros(outputs)}


def linear(p: Any, x: Any) -> Any:
    """x (..., inputs) to (..., outputs)."""
    return (x @ p["kernel"] + p["bias"].reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def norm(x: Any) -> Any:
    """Each vector with mean 0 and deviation 1."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def block(key: Any, width: int, depth: int) -> Any:
    keys = jax.random.split(key, 4)
    return {
        "qkv": dense(keys[0], width, 3 * width),
        "out": dense(keys[1], width, width, depth**-0.5),
        "up": dense(keys[2], width, 4 * width),
        "down": dense(keys[3], 4 * width, width, depth**-0.5),
    }


def attended(p: Any, x: Any, heads: int) -> Any:
    """A block of a transformer without a mask: x (B, T, width)."""
    q, k, v = (part.reshape(*x.shape[:2], heads, -1) for part in jnp.split(linear(p["qkv"], norm(x)), 3, -1))
    mixed = jax.nn.dot_product_attention(q, k, v)
    x = x + linear(p["out"], mixed.reshape(x.shape))
    return x + linear(p["down"], jax.nn.gelu(linear(p["up"], norm(x))))
