"""The feed-forward layer of a transformer, in its usual forms (Shazeer 2020)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Form = Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu2"]
"""Gated by SiLU or by GELU (tanh form), or ungated: GELU, exact or in its tanh form, or the square of ReLU (So et al.
2021)."""


def gelu(x: jax.Array) -> jax.Array:
    """x (...) times the normal distribution function of x (Hendrycks and Gimpel 2016), as PyTorch computes it.

    In float32, 1 + erf(x / sqrt(2)) takes less time than the erfc(-x / sqrt(2)) of `jax.nn.gelu`. In shorter dtypes it
    would lose its small results to rounding.
    """
    if x.dtype != jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    return 0.5 * x * (1.0 + jax.lax.erf(x * np.float32(0.5**0.5)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": partial(jax.nn.gelu, approximate=True),
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def gated(form: Form) -> bool:
    """Whether the hidden values are multiplied by a second, activated product (`gate`)."""
    return form in ("swiglu", "geglu")


def hidden(form: Form, product: Callable[[str], jax.Array]) -> jax.Array:
    """The hidden values; `product(name)` multiplies the input with the matrix `up` or, in gated forms, `gate`."""
    activation = ACTIVATIONS[form]
    return activation(product("gate")) * product("up") if gated(form) else activation(product("up"))
