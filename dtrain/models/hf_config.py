"""Read a Hugging Face config.json into the decoder that it describes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError, FieldError
from dtrain.core.types import JsonObject
from dtrain.models.decoder import Decoder
from dtrain.models.hf_fields import COMMON, DEFAULTS, IGNORED, NEUTRAL, Fields
from dtrain.models.hf_rope import positions
from dtrain.models.moe import Experts
from dtrain.models.rope import Learned
from dtrain.models.settings import settings

ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
GEMMA_GELU = {None, "gelu", "gelu_new", "gelu_pytorch_tanh"}
"""Gemma's first files have `gelu` but mean its tanh form."""


@dataclass(frozen=True)
class Published:
    """A decoder as config.json describes it."""

    model: Decoder
    sources: Mapping[str, str]
    """For each setting of the decoder its source in config.json: "rms_norm_eps: 1e-06"."""
    unserved: tuple[str, ...]
    """Fields and values that dtrain's decoder does not support."""
    unchecked: tuple[str, ...]
    """Fields that dtrain does not recognise."""
    positions: int | None
    """The longest context that config.json states."""


def published_model(config: JsonObject, context: int, path: Path) -> Published:
    """The decoder of a config.json, for rows of at most `context` tokens.

    Raises DataError if its architecture is not supported, or a field is missing or has an impossible value.
    """
    if config["model_type"] == "gemma3" and isinstance(config.get("text_config"), dict):  # with an image encoder
        config = {"model_type": "gemma3_text"} | config["text_config"]
    kind = str(config["model_type"])
    if kind not in DEFAULTS:
        named = ", ".join(config.get("architectures") or []) or "no architecture named"
        supported = ", ".join(sorted(DEFAULTS))
        raise DataError(f"{path}: dtrain does not support model_type {kind} ({named})", f"supported: {supported}")
    fields = Fields(config, DEFAULTS[kind] if kind == "gpt2" else COMMON | DEFAULTS[kind], path)
    for name, neutral in NEUTRAL.items():
        if config.get(name) is not None and config[name] not in neutral:
            fields.refuse(f"{name}: {config[name]}")
    try:
        own: dict[str, Any] = {"context": context} | (
            _gpt2(fields) if kind == "gpt2" else _llama(fields, kind, context)
        )
        model = Decoder(**own)
    except (FieldError, KeyError, TypeError, ArithmeticError, AttributeError) as error:
        raise DataError(f"{path} does not describe a decoder: {type(error).__name__} {error}") from error
    sources = dict.fromkeys(settings(model), f"model_type: {kind}") | fields.sources
    unchecked = sorted(config.keys() - fields.known - IGNORED - NEUTRAL.keys())
    positions = config.get("n_positions" if kind == "gpt2" else "max_position_embeddings")
    return Published(model, sources, tuple(fields.unserved), tuple(unchecked), positions)


def _gpt2(fields: Fields) -> dict[str, object]:
    width = fields("n_embd", "width")
    fields.known.add("n_inner")
    fields.sources["hidden"] = f"n_inner: {fields.values.get('n_inner')}, n_embd: {width}"
    return {
        "vocab": fields("vocab_size", "vocab"),
        "context": fields("n_positions", "context"),
        "layers": fields("n_layer", "layers"),
        "width": width,
        "heads": fields("n_head", "heads"),
        "hidden": fields.values.get("n_inner") or 4 * width,
        "feed_forward": _activation(fields, "activation_function", GPT2_ACTIVATIONS),
        "epsilon": fields("layer_norm_epsilon", "epsilon"),
        "tied": fields("tie_word_embeddings", "tied"),
        "position": Learned(),
        "norm": "layer",
        "norm_bias": True,
        "bias": True,
    }


def _llama(fields: Fields, kind: str, context: int) -> dict[str, object]:
    """All others: Llama, Mistral, Mixtral, Qwen, Gemma, Phi-3 and OLMo 2."""
    width, heads = fields("hidden_size", "width"), fields("num_attention_heads", "heads")
    gemma, layers = kind.startswith("gemma"), fields("num_hidden_layers", "layers")
    act = "hidden_activation" if gemma and fields("hidden_activation") else "hidden_act"
    gelu = gemma and fields.values.get(act) in GEMMA_GELU
    fields.known |= {"hidden_act", "max_position_embeddings"}
    own = {
        "vocab": fields("vocab_size", "vocab"),
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": fields("num_key_value_heads", "kv_heads") or heads,
        "head_dim": fields("head_dim", "head_dim") or width // heads,
        "epsilon": fields("rms_norm_eps", "epsilon"),
        "tied": fields("tie_word_embeddings", "tied"),
        **positions(fields),
        "bias": _bias(fields, kind),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind.startswith(("qwen3", "gemma3", "olmo2")),
        "qk_norm_joint": kind == "olmo2",
        "pre_norm": kind != "olmo2",
        "post_norm": kind in ("gemma2", "gemma3_text", "olmo2"),
        "feed_forward": "geglu" if gelu else _activation(fields, act, ACTIVATIONS),
        **_windows(fields, kind, layers, context),
        **_feed_forward(fields, kind),
    }
    if own.get("window") is None and "window_theta" in own:
        own["window_theta"] = None  # no layer has a window
    if gemma:
        own |= {"norm_offset": True, "embed_scale": True}
    if kind in ("gemma2", "gemma3_text"):
        own["query_pre_attn_scalar"] = fields("query_pre_attn_scalar", "query_pre_attn_scalar")
        own["attention_softcap"] = fields("attn_logit_softcapping", "attention_softcap")
        if kind == "gemma3_text" and own["attention_softcap"] is not None:  # which transformers does not apply
            fields.refuse(f"attn_logit_softcapping: {own['attention_softcap']}")
        own["logit_softcap"] = fields("final_logit_softcapping", "logit_softcap")
    return own


def _activation(fields: Fields, name: str, known: Mapping[str, str]) -> str:
    value = fields(name, "feed_forward")
    if value not in known:
        fields.refuse(f"{name}: {value}")
    return known.get(value, next(iter(known.values())))


def _bias(fields: Fields, kind: str) -> bool:
    """Whether all matrix products have biases. Biases in attention only, its output included, are not supported."""
    if kind in ("mistral", "mixtral", "qwen2", "phi3"):
        return False
    attention, inner = bool(fields("attention_bias", "bias")), kind == "llama" and bool(fields("mlp_bias"))
    if attention != inner:
        fields.refuse(f"attention_bias: {attention}, mlp_bias: {inner}")
    return attention and inner


def _feed_forward(fields: Fields, kind: str) -> dict[str, object]:
    if kind == "mixtral":
        count, size, gates = "num_local_experts", "intermediate_size", True
    elif kind == "qwen3_moe":
        count = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
        size, gates = "moe_intermediate_size", fields("norm_topk_prob", "experts.renormalise")
        fields.known |= {"decoder_sparse_step", "mlp_only_layers", "intermediate_size"}
        if fields.values.get("decoder_sparse_step", 1) != 1 or fields.values.get("mlp_only_layers"):
            fields.refuse("decoder_sparse_step, mlp_only_layers: layers without experts")
    else:
        return {"hidden": fields("intermediate_size", "hidden")}
    active = fields("num_experts_per_tok", "experts.active")
    experts = Experts(
        count=fields(count, "experts.count"), active=active, hidden=fields(size, "experts.hidden"), renormalise=gates
    )
    return {"experts": experts}


def _windows(fields: Fields, kind: str, layers: int, context: int) -> JsonObject:
    """`window` and `global_every`, from the window of each layer."""
    if "sliding_window" not in fields.defaults:
        return {}
    size, types = fields("sliding_window", "window"), fields.values.get("layer_types")
    fields.known |= {"layer_types", "use_sliding_window", "max_window_layers", "sliding_window_pattern"}
    fields.known.add("_sliding_window_pattern")
    size = None if "use_sliding_window" in fields.defaults and not fields("use_sliding_window") else size
    if kind == "qwen3_moe" and size and size < context:  # versions of transformers differ in which layers have it
        fields.refuse(f"use_sliding_window: True, sliding_window: {size}")
    first = fields("max_window_layers") if "max_window_layers" in fields.defaults else 0
    every = {"gemma2": 2, "gemma3_text": fields.values.get("sliding_window_pattern", 6)}.get(kind, layers + 1)
    per_layer = [None if number < first or (number + 1) % every == 0 else size for number in range(layers)]
    if types and kind == "mixtral" and "full_attention" in types and size:  # transformers ignores it there
        fields.refuse(f"layer_types: {', '.join(sorted(set(types)))}, sliding_window: {size}")
    if types:
        if len(types) != layers or set(types) - {"sliding_attention", "full_attention"}:
            fields.refuse(f"layer_types: {', '.join(sorted(set(types)))}, {len(types)} of {layers} layers")
            return {}
        per_layer = [size if name == "sliding_attention" else None for name in types]
    if kind != "gemma3_text":  # there the layers with a window have rotary positions of their own
        per_layer = [None if window is None or window >= context else window for window in per_layer]
    spread = f"sliding_window: {size} in {layers - per_layer.count(None)} of {layers} layers"
    fields.sources |= {"window": spread, "global_every": spread}
    if len(set(per_layer)) == 1:
        return {"window": per_layer[0]}
    for every in range(2, layers + 1):
        if per_layer == [None if number % every == 0 else size for number in range(1, layers + 1)]:
            return {"window": size, "global_every": every}
    fields.refuse(spread)
    return {}
