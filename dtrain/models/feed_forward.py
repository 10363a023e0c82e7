"""The feed-forward layer of a transformer, in its usual forms (Shazeer 2020)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax

Form = Literal["swiglu", "geglu", "gelu", "gelu_tanh"]
"""Gated by SiLU or by GELU (tanh), or GELU alone, exact or by tanh."""

BENDS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated(form: Form) -> bool:
    """Whether a second product gates the first."""
    return form in ("swiglu", "geglu")


def hidden(form: Form, product: Callable[[str], jax.Array]) -> jax.Array:
    """The hidden values, from the products with the matrices `up` and, where there is one, `gate`."""
    bend = BENDS[form]
    return bend(product("gate")) * product("up") if gated(form) else bend(product("up"))
