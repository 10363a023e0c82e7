"""The product of activations with a matrix, and its gradient in the order in which it is wanted."""

import math

import jax

from dtrain.varying import axes_of, vary


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, w), (x, w)


def _backward(kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    rows = tuple(range(x.ndim - 1))
    return (
        jax.lax.dot_general(g, w, (((g.ndim - 1,), (1,)), ((), ()))),
        jax.lax.dot_general(x, g, ((rows, rows), ((), ()))),
    )


_product.defvjp(_forward, _backward)


def product(x: jax.Array, w: jax.Array, inner: int = 1) -> jax.Array:
    """x (..., *inner) times w (*inner, *outer), `inner` dims summed over: (..., *outer).

    As `tensordot`, whose own rule gives the gradient of w transposed: on a CPU the way back costs
    more than the product.
    """
    outer = w.shape[inner:]
    flat = w.reshape(math.prod(w.shape[:inner]), -1)
    out = _product(x.reshape(*x.shape[: x.ndim - inner], -1), vary(flat, axes_of(x)))
    return out.reshape(*out.shape[:-1], *outer)
