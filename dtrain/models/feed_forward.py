"""The feed-forward layer of a transformer, in its usual forms (Shazeer 2020)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax

Form = Literal["swiglu", "geglu", "gelu", "gelu_tanh"]
"""Gated by SiLU or by GELU (tanh form), or ungated GELU, exact or in its tanh form."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated(form: Form) -> bool:
    """Whether the hidden values are multiplied by a second, activated product (`gate`)."""
    return form in ("swiglu", "geglu")


def hidden(form: Form, product: Callable[[str], jax.Array]) -> jax.Array:
    """The hidden values; `product(name)` multiplies the input with the matrix `up` or, in gated forms, `gate`."""
    activation = ACTIVATIONS[form]
    return activation(product("gate")) * product("up") if gated(form) else activation(product("up"))
