"""The product of activations with a matrix, with its own gradient: order and dtype of operands and dtype of sums are
chosen."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.models.nn.low_rank import LowRank
from dtrain.models.nn.narrow_products import FORMATS, narrow_matmul
from dtrain.models.nn.quantised import Quantised
from dtrain.models.nn.remat import PRODUCT
from dtrain.models.nn.vma import axes_of, varied, vary

_NARROW = ContextVar("narrow", default="")
_FLOAT32_SUMS = ContextVar("float32_sums", default=True)
_FLAT = ContextVar("flat", default=False)
_ON_TPU = ContextVar("on_tpu", default=False)


@contextmanager
def products(float32_sums: bool, flat: bool, on_tpu: bool = False, narrow: str = "") -> Iterator[None]:
    """Within this context, steps are traced with gradients of matrices summed in float32, or in the compute dtype.

    `flat`: activations are multiplied as matrices. XLA:CPU copies those with more dims into another order first, which
    takes longer than the product. Not for a compiler that splits tokens over devices: it would have to gather them.
    `on_tpu`: `on_tpu()` is true. `narrow`: the name of a format of 8 bits in which products are computed.
    """
    tokens = _FLOAT32_SUMS.set(float32_sums), _FLAT.set(flat), _ON_TPU.set(on_tpu)
    of_products = _NARROW.set(narrow)
    try:
        yield
    finally:
        _FLOAT32_SUMS.reset(tokens[0])
        _FLAT.reset(tokens[1])
        _ON_TPU.reset(tokens[2])
        _NARROW.reset(of_products)


def on_tpu() -> bool:
    """Whether the step that is being traced will run on TPUs."""
    return _ON_TPU.get()


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: jax.Array, w: jax.Array, dtype: str | None) -> jax.Array:
    rows = _rows(x)
    out = jax.lax.dot_general(rows, w, (((rows.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)
    return out.reshape(*x.shape[:-1], w.shape[1])


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1]) if _FLAT.get() else x


def _forward(x: jax.Array, w: jax.Array, dtype: str | None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul(x, w, dtype), (x, w)


def _backward(_: str | None, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    (x, w), shape = saved, saved[0].shape
    x, g = _rows(x), _rows(g.astype(x.dtype))
    rows = tuple(range(x.ndim - 1))
    # dw = x^T g, dx = g w^T. The compiler sums dw over the devices that hold other rows: in float32 by default.
    dtype = jnp.float32 if _FLOAT32_SUMS.get() else w.dtype
    of_w = jax.lax.dot_general(x, g, ((rows, rows), ((), ())), preferred_element_type=dtype)
    return jax.lax.dot_general(g, w, (((g.ndim - 1,), (1,)), ((), ()))).reshape(shape), of_w.astype(w.dtype)


_matmul.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _quantised_matmul(
    x: jax.Array, codes: jax.Array, scales: jax.Array, like: Quantised, of_x: tuple[int, str], dtype: str | None
) -> jax.Array:
    """x times a matrix whose values are computed here, and again in the backward pass: they are not saved for it.

    `of_x`: how many dims of x are summed, and its dtype.
    """
    w, contract_dims = replace(like, codes=codes, scales=scales).wide(x.dtype), of_x[0]
    flat: jax.Array = w.reshape(math.prod(w.shape[:contract_dims]), -1)
    out: jax.Array = _matmul(x.reshape(*x.shape[: x.ndim - contract_dims], -1), flat, dtype)
    return out.reshape(*out.shape[:-1], *w.shape[contract_dims:])


def _quantised_forward(
    x: jax.Array, codes: jax.Array, scales: jax.Array, like: Quantised, of_x: tuple[int, str], dtype: str | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _quantised_matmul(x, codes, scales, like, of_x, dtype), (codes, scales)


def _quantised_backward(
    like: Quantised, of_x: tuple[int, str], _: str | None, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, None, None]:
    contract_dims, dtype = of_x
    w = replace(like, codes=saved[0], scales=saved[1]).wide(dtype)
    columns = tuple(range(g.ndim - w.ndim + contract_dims, g.ndim))
    gradient = jax.lax.dot_general(g.astype(dtype), w, ((columns, tuple(range(contract_dims, w.ndim))), ((), ())))
    return gradient, None, None


_quantised_matmul.defvjp(_quantised_forward, _quantised_backward)


def matmul(
    x: jax.Array,
    w: jax.Array | LowRank | Quantised,
    contract_dims: int = 1,
    name: str = PRODUCT,
    dtype: str | None = None,
    *,
    narrow: bool = True,
) -> jax.Array:
    """x (..., *inner) times w (*inner, *outer), summed over the `contract_dims` inner dims: (..., *outer).

    Like `tensordot`, whose gradient of w is computed transposed: on a CPU that transpose costs more than the product.
    `name`: that of the result, for rematerialisation policies that save it. `dtype`: to which the sums are rounded;
    default: that of x. `narrow`: whether `precision.matmul` may compute it in 8 bits: not for an output head, nor for
    low-rank factors, which cost little.
    """
    if isinstance(w, LowRank):
        small = matmul(x, w.a, contract_dims, name, narrow=False)
        adapted = matmul(small, w.b, name=name, dtype=dtype, narrow=False)
        return matmul(x, w.base, contract_dims, name, dtype, narrow=narrow) + w.scale * adapted
    if isinstance(w, Quantised):
        codes, scales = (vary(part, axes_of(x)) for part in (w.codes, w.scales))
        like = replace(w, codes=None, scales=None)
        of_x = (contract_dims, str(x.dtype))
        return checkpoint_name(_quantised_matmul(vary(x, axes_of(codes)), codes, scales, like, of_x, dtype), name)
    outer = w.shape[contract_dims:]
    flat = w.reshape(math.prod(w.shape[:contract_dims]), -1)
    rows = vary(x.reshape(*x.shape[: x.ndim - contract_dims], -1), axes_of(w))
    flat = varied(flat, axes_of(x))
    to = FORMATS.get(_NARROW.get())
    if narrow and to and max(flat.shape) <= to.most:
        out: Any = narrow_matmul(_rows(rows), flat, to, dtype or str(x.dtype), on_tpu())
        out = out.reshape(*rows.shape[:-1], -1)
    else:
        out = _matmul(rows, flat, dtype)
    return checkpoint_name(out.reshape(*out.shape[:-1], *outer), name)
