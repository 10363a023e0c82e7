"""The parameters of one decoder layer, as the fields of its `model` section require, and what a token costs."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtrain.models.moe import matrices
from dtrain.models.nn import param as declare
from dtrain.models.nn.attention import mean_attended_keys
from dtrain.models.nn.layers import bias, scale
from dtrain.models.nn.param import Param, Tree

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder


def layer(model: "Decoder") -> Tree:
    """Parameters of attention, and of a feed-forward layer or a mixture of experts."""
    width, dim = model.width, model.size_of_head
    inner = declare.normal(model.init)
    outer = declare.normal(model.init / (math.sqrt(2 * model.layers) if model.depth_init else 1))
    q, kv = ((width, model.heads, dim), "embed heads _"), ((width, model.groups, dim), "embed kv_heads _")
    tree: Tree = {"norm1": norm(model, width, "embed"), "norm2": norm(model, width, "embed")}
    for name, (shape, dims) in {"query": q, "key": kv, "value": kv}.items():
        tree[name] = {"weight": Param(shape, dims, inner, fan_in=("embed",))}
        if model.bias or model.qkv_bias:
            tree[name]["bias"] = bias(shape[1:], dims.partition(" ")[2])
    tree["out"] = {"weight": Param((model.heads, dim, width), "heads _ embed", outer, fan_in=("heads", "_"))}
    if model.experts:
        tree["moe"] = model.experts.params(width, model.feed_forward, inner, outer)
    else:
        size = model.hidden or 4 * width
        tree["mlp"] = matrices(width, size, model.feed_forward, inner, outer)
        if model.bias:
            inner_biases = {f"{name}_bias": bias((size,), "hidden") for name in tree["mlp"] if name != "down"}
            tree["mlp"] |= inner_biases | {"down_bias": bias((width,), "embed")}
    if model.bias:
        tree["out"]["bias"] = bias((width,), "embed")
    if model.qk_norm:
        tree |= {f"{name}_norm": norm(model, dim, "_")["scale"] for name in ("query", "key")}
    if model.post_norm:
        tree |= {"post1": norm(model, width, "embed"), "post2": norm(model, width, "embed")}
    return tree


def norm(model: "Decoder", size: int, dim: str) -> Tree:
    """Scale, and bias with `norm_bias`, of a normalisation over `dim`."""
    factor = bias((size,), dim) if model.norm_offset else scale((size,), dim)  # an offset from one starts at zero
    return {"scale": factor} | ({"bias": bias((size,), dim)} if model.norm_bias else {})


def flops_per_token(model: "Decoder", length: int, windows: Sequence[int | None]) -> float:
    """Floating-point operations per token, forward and backward, in rows of `length`; `windows` of one round of layers.

    6 x the parameters in products, and 12 x width x keys for attention (Chowdhery et al. 2022, appendix B), the keys
    being those that the causal mask and the window allow.
    """
    tree = model.params()
    used = declare.count({name: tree[name] for name in ("blocks", "norm")}) + model.vocab * model.width
    if model.experts:
        idle = 1 - model.experts.active / model.experts.count
        used -= idle * declare.count(tree["blocks"]["moe"]["experts"])
    keys = model.layers * sum(mean_attended_keys(length, window) for window in windows) / len(windows)
    return 6 * used + 12 * model.heads * model.size_of_head * keys
