"""The speed of this machine's devices, measured."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.core.types import Device


def matrix_rate(device: Device, dtype: str = "") -> tuple[float, str]:
    """FLOP/s of a product of two large square matrices on one device, and its dtype and shape as text."""
    cpu = device.platform == "cpu"
    size = 1024 if cpu else 8192
    matrix = jnp.ones((size, size), dtype or ("float32" if cpu else "bfloat16"))
    rate = 2 * size**3 / shortest(jax.jit(lambda a: a @ a), matrix)
    return rate, f"{matrix.dtype} {size} x {size}"


def shortest(function: Callable[[Any], Any], argument: Any) -> float:
    """Seconds of the shortest of a few executions, after one that compiles."""

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(argument))
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(5))
