"""The feed-forward layer of a transformer, in its usual forms (Shazeer 2020)."""

from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.models.nn.context import Context

Form = Literal["swiglu", "geglu", "swiglu_clamped", "gelu", "gelu_tanh", "relu", "relu2"]
"""Gated by SiLU or by GELU (tanh form), or by SiLU of clamped values (gpt-oss); or ungated: GELU, exact or in its tanh
form, ReLU, or its square (So et al. 2021)."""

LIMIT, SLOPE = 7.0, 1.702
"""Of swiglu_clamped: the bound of its values, and the factor inside the sigmoid."""


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
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def gated(form: Form) -> bool:
    """Whether the hidden values are multiplied by a second, activated product (`gate`)."""
    return form in ("swiglu", "geglu", "swiglu_clamped")


def activation(form: Form) -> Callable[[jax.Array], jax.Array]:
    """The function of a form; that of swiglu_clamped is SiLU without its bound."""
    return ACTIVATIONS.get(form, jax.nn.silu)


def sparse(x_BTF: jax.Array, share: float, size: int, ctx: Context) -> jax.Array:
    """How much each value is above the cut that a `share` of the values of a token are below if they are normally
    distributed; zero for those below (Gemma 3n). `size`: that of F on all devices together."""
    wide_BTF = x_BTF.astype(jnp.float32)
    mean_BT1 = ctx.reduce(wide_BTF.sum(-1, keepdims=True), "hidden") / size
    variance_BT1 = ctx.reduce(jnp.square(wide_BTF - mean_BT1).sum(-1, keepdims=True), "hidden") / size
    deviation_BT1 = jnp.sqrt(jnp.maximum(variance_BT1, 1e-30))  # the root of zero has no gradient
    return jax.nn.relu(wide_BTF - (mean_BT1 + NormalDist().inv_cdf(share) * deviation_BT1)).astype(x_BTF.dtype)


def hidden(form: Form, product: Callable[[str], jax.Array]) -> jax.Array:
    """The hidden values; `product(name)` multiplies the input with the matrix `up` or, in gated forms, `gate`."""
    if form == "swiglu_clamped":
        gate, up = jnp.minimum(product("gate"), LIMIT), jnp.clip(product("up"), -LIMIT, LIMIT)
        return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)
    activation = ACTIVATIONS[form]
    return activation(product("gate")) * product("up") if gated(form) else activation(product("up"))
