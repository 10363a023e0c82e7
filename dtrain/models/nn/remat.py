"""Rematerialisation: which values the forward pass saves for the backward pass, and their names."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

import jax

Remat = Literal["none", "full", "dots", "attention", "offload"]
"""Which values of a layer are saved for the backward pass; the rest is recomputed.
none: all values; full: its input only; attention: also the results of attention; dots: also those of matrix products,
including those of experts; offload: its input, in the host's memory."""

Saved = Literal["attention", "query", "key", "value", "out", "gate", "up", "down"]
"""Values of a layer that a policy can save one by one: results of attention, and of the product with the matrix of
that name; where splash attention is used, queries, keys and values as it reads them, after rotation."""

QKV: tuple[Saved, ...] = ("query", "key", "value")
ON_DEVICE: tuple[Remat | tuple[Saved, ...], ...] = (
    "none", "dots", ("attention", *QKV, "out", "up"), ("attention", *QKV, "out"), "attention", "full",
)  # fmt: skip
"""Policies that keep everything on the device, the least recomputation first."""

ATTENTION = "attention"
PRODUCT = "product"
INPUT = "layer_input"
"""Names by which policies select values: results of attention and of matrix products, inputs of layers."""

PRODUCTS = (PRODUCT, *(name for name in get_args(Saved) if name != ATTENTION))
"""The names of results of matrix products."""

Policy = Callable[..., Any]
"""(primitive, its inputs, its parameters) → whether its results are saved."""

CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
"""The primitive of cuDNN attention, selected as a whole: its softmax statistics have no name of their own, and unless
they are saved the kernel runs again."""

VIEWS = ("reshape", "squeeze", "pvary", "pcast", "name")
"""Primitives that only change a value's view. To save such a view of a gathered parameter would save the parameter."""


def policy(remat: Remat | Collection[str]) -> Policy | None:
    """The policy for `jax.checkpoint`, for a name or for the names of what is saved; None if nothing is recomputed."""
    policies = jax.checkpoint_policies
    attention = _either(policies.save_only_these_names(ATTENTION), _cudnn)
    products = policies.save_only_these_names(*PRODUCTS)
    if not isinstance(remat, str):
        named = policies.save_only_these_names(*remat)
        return _either(named, _cudnn) if ATTENTION in remat else named
    if remat == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return {
        "none": None,
        "full": policies.nothing_saveable,
        "attention": attention,
        "dots": _either(attention, products, policies.dots_with_no_batch_dims_saveable),
    }[remat]


def regather(axes: Collection[str]) -> Policy:
    """Save everything except results of all-gathers over these axes: parameters that are split to save memory."""

    def gathers(name: str, params: Mapping[str, Any]) -> bool:
        if inner := params.get("call_jaxpr"):  # a gather of parameters that are not differentiated is one call
            return any(gathers(step.primitive.name, step.params) for step in getattr(inner, "jaxpr", inner).eqns)
        return name.startswith("all_gather") and set(_names(params["axis_name"])) <= set(axes)

    def keeps(primitive: Any, *_: Any, **params: Any) -> bool:
        return not gathers(primitive.name, params) and primitive.name not in VIEWS

    return keeps


def _names(axis: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis


def _either(*several: Policy) -> Policy:
    return lambda primitive, *inputs, **params: any(rule(primitive, *inputs, **params) for rule in several)


def _cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name == CUDNN_ATTENTION
