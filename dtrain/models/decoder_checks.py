"""Checks of a decoder's settings: which of them exclude each other."""

from typing import TYPE_CHECKING

from dtrain.core.errors import FieldError
from dtrain.models.feed_forward import gated
from dtrain.models.layer_pattern import ATTENTION, OTHER_MIXERS, shared_from
from dtrain.models.rope import Learned, Rope

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

PATTERNED = ("window", "global_every", "window_theta")
"""Settings that `pattern` replaces."""

OF_ATTENTION = (
    "qk_norm", "qk_norm_plain", "value_norm", "qkv_clip", "qkv_bias", "out_bias", "latent", "attention_gate", "sinks",
    "query_growth", "attention_softcap", "attention_multiplier", "query_pre_attn_scalar",
)  # fmt: skip
"""Settings that only layers with attention have."""


def check(model: "Decoder") -> None:
    """FieldError for settings of rotation, windows and kinds of layers that exclude each other."""
    if model.pattern and (given := [name for name in PATTERNED if getattr(model, name)]):
        hint = "give each kind of layer its own window"
        raise FieldError(given[0], f"{given[0]} and pattern exclude each other", hint)
    if model.pattern and isinstance(model.position, Learned):
        raise FieldError("pattern", "layers of a model with learned positions have no kinds", "use position rope")
    if (size := sum(kind.count for kind in model.pattern)) > model.layers:
        hint = f"set layers to {size} or more, or leave kinds out of pattern"
        raise FieldError("pattern", f"has {size} layers, and the model {model.layers}", hint)
    if model.global_every and model.window is None:
        raise FieldError("global_every", f"global_every = {model.global_every}: set window")
    if model.window_theta and (model.window is None or not isinstance(model.position, Rope) or model.window_theta <= 1):
        raise FieldError("window_theta", f"window_theta = {model.window_theta}: needs window, rotary positions, > 1")
    for rope, dim in model.rotations:
        if (size := rope.rotates(dim)) % 2 or not size:
            what = "is odd" if rope.partial == 1 else f"x position.partial = {rope.partial} is {size}"
            name = "latent.rotated" if model.latent else "head_dim"
            where = "pattern" if dim != model.head_size and not model.latent else name
            raise FieldError(where, f"{name} = {dim} {what}; rotary positions rotate pairs")
    if any(kind.dense for kind in model.pattern) and (not model.experts or model.hidden is None):
        raise FieldError("pattern", "dense layers are those of a model with experts: set experts and hidden")
    if model.experts and model.experts.beside and (model.hidden is None or model.parallel):
        raise FieldError("experts.beside", "beside: set hidden, the width of the feed-forward layer; without parallel")
    if model.experts and all(kind.dense for kind in model.round):
        raise FieldError("pattern", "no layer has experts: leave experts out")
    if any(kind.chunk and kind.window for kind in model.pattern):
        raise FieldError("pattern", "chunk and window exclude each other in a layer")
    beside = model.experts is None or model.experts.beside
    if any(kind.hidden and not kind.dense and not beside for kind in model.pattern):
        hint = "set experts.hidden, or dense: true"
        raise FieldError("pattern", "hidden is the width of a feed-forward layer, and these layers have experts", hint)
    _check_streams(model)
    _check_further(model)
    _check_heads(model)
    _check_mixers(model)
    _check_latent(model)
    _check_norms(model)


def _check_streams(model: "Decoder") -> None:
    """FieldError for what is not defined with several streams, with low-rank residuals and with sparse layers."""
    if model.altup and model.layer_scale:
        raise FieldError("layer_scale", "layer_scale and altup exclude each other")
    if model.laurel_rank and (model.parallel or not model.pre_norm):
        raise FieldError("laurel_rank", "laurel_rank needs pre_norm: true and parallel: false")
    if (words := model.layer_inputs_vocab) and (not model.layer_inputs or (model.vocab and words >= model.vocab)):
        message = f"layer_inputs_vocab = {words}: needs layer_inputs, and fewer than vocab = {model.vocab}"
        raise FieldError("layer_inputs_vocab", message)
    beside = model.experts is None or model.experts.beside
    if any(kind.sparsity and not kind.dense and not beside for kind in model.pattern):
        raise FieldError("pattern", "sparsity is about a feed-forward layer, and these layers have experts")
    if any(kind.sparsity for kind in model.pattern) and not gated(model.feed_forward):
        raise FieldError("pattern", f"sparsity is about gates, which {model.feed_forward} does not have")


def _check_further(model: "Decoder") -> None:
    """FieldError for what layers that predict further tokens do not have."""
    if model.multi_token is None:
        return
    for name in ("altup", "layer_inputs"):
        if getattr(model, name):
            raise FieldError("multi_token", f"multi_token and {name} exclude each other")
    if model.kinds[-1].shared_keys:
        message = "its layers are like the last one of the model, which shares the keys of another layer"
        raise FieldError("multi_token", message)


def _check_heads(model: "Decoder") -> None:
    """FieldError for heads of some layers that do not fit, and for keys of earlier layers."""
    names = ("head_dim", "kv_heads", "shared_values", "shared_keys")
    for kind in model.pattern:
        own = {name: value for name in names if (value := getattr(kind, name))}
        if own and (kind.mixer != ATTENTION or model.latent):
            what = "latent attention" if model.latent else f"mixer {kind.mixer}"
            raise FieldError("pattern", f"{next(iter(own))} is not a setting of layers with {what}")
        if kind.kv_heads and model.heads % kind.kv_heads:
            raise FieldError("pattern", f"kv_heads = {kind.kv_heads} does not divide heads = {model.heads}")

    try:
        shared_from(model.round)
    except KeyError as missing:
        same = missing.args[0].removeprefix("keys ")
        message = f"shared_keys: no earlier layer has keys of its own of the same window, rotation and sizes ({same})"
        raise FieldError("pattern", message, "begin the pattern with such a layer") from missing
    if any(kind.shared_keys and kind.shared_values for kind in model.pattern):
        raise FieldError("pattern", "layers with shared_keys have their values from an earlier layer, not from keys")


def _check_mixers(model: "Decoder") -> None:
    """FieldError for settings of layers without attention that do not fit together."""
    for kind in model.pattern:
        if kind.mixer == ATTENTION:
            continue
        if model.mixer(kind) is None:
            raise FieldError("pattern", f"layers have the mixer {kind.mixer}: set its sizes in model.{kind.mixer}")
        if kind.window or kind.chunk or kind.position:
            message = f"layers of mixer {kind.mixer} have neither a window, chunks nor rotary positions"
            raise FieldError("pattern", message)
    used = {kind.mixer for kind in model.pattern}
    if used - {ATTENTION} and model.bias:
        hint = "set qkv_bias, out_bias and mlp_bias, which are those of layers with attention"
        raise FieldError("bias", "layers without attention have no biases", hint)
    if used and ATTENTION not in used and (given := [name for name in OF_ATTENTION if getattr(model, name)]):
        raise FieldError(given[0], f"{given[0]} is a setting of attention, which no layer of model.pattern has")
    if unused := [name for name in OTHER_MIXERS if getattr(model, name) and name not in used]:
        hint = f"name it in some of the layers, as in pattern: [{{count: 3, mixer: {unused[0]}}}, {{}}]"
        raise FieldError(unused[0], f"no layer of model.pattern has the mixer {unused[0]}", hint)
    if (delta := model.delta) and delta.value_heads % delta.key_heads:
        message = f"key_heads = {delta.key_heads} does not divide value_heads = {delta.value_heads}"
        raise FieldError("delta.key_heads", message)


def _check_latent(model: "Decoder") -> None:
    """FieldError for settings that latent attention does not have."""
    if model.latent is None:
        return
    if model.groups != model.heads:
        raise FieldError("kv_heads", "latent attention has as many keys and values as heads: leave kv_heads out")
    if model.latent.rotated >= model.head_size:
        message = f"latent.rotated = {model.latent.rotated} leaves nothing of head_dim = {model.head_size}"
        raise FieldError("latent.rotated", message)
    others = (
        "qk_norm",
        "qk_norm_plain",
        "value_norm",
        "qkv_bias",
        "qkv_clip",
        "bias",
        "query_growth",
        "attention_gate",
    )
    if given := next((name for name in others if getattr(model, name)), None):
        raise FieldError(given, f"latent attention has no {given}")


def _check_norms(model: "Decoder") -> None:
    """FieldError for settings of normalisations and of attention's scale that exclude each other."""
    if not (model.pre_norm or model.post_norm):
        raise FieldError("pre_norm", "pre_norm and post_norm are both false: a layer must be normalised somewhere")
    if model.attention_multiplier and model.query_pre_attn_scalar:
        message = "attention_multiplier and query_pre_attn_scalar exclude each other"
        raise FieldError("attention_multiplier", message)
    if model.parallel and not model.pre_norm:
        raise FieldError("parallel", "parallel: attention and the feed-forward layer read what pre_norm normalises")
    if model.parallel_norms and not model.parallel:
        raise FieldError("parallel_norms", "parallel_norms is about layers with parallel: true")
    if not model.norm_scale and (model.norm_bias or model.norm_offset):
        raise FieldError("norm_scale", "norm_scale: false leaves norm_bias and norm_offset nothing to change")
    if model.qk_norm_joint and (not model.qk_norm or model.norm != "rms" or model.norm_offset or not model.norm_scale):
        message = "qk_norm_joint needs qk_norm: true, norm: rms, norm_scale: true and norm_offset: false"
        raise FieldError("qk_norm_joint", message)
    if model.qk_norm_plain and model.qk_norm:
        raise FieldError("qk_norm_plain", "qk_norm and qk_norm_plain exclude each other")
    if model.qk_norm_rotated and (not model.qk_norm or model.qk_norm_joint):
        raise FieldError("qk_norm_rotated", "qk_norm_rotated needs qk_norm: true and qk_norm_joint: false")
