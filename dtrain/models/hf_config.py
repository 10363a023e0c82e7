"""Read a Hugging Face config.json into the decoder that it describes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError, FieldError
from dtrain.core.types import JsonObject
from dtrain.models.decoder import Decoder
from dtrain.models.moe import Experts
from dtrain.models.rope import Learned, LinearScaling, Llama3, Rope, Yarn
from dtrain.models.settings import settings

SCALINGS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"},
}
"""The supported kinds of scaling, and the fields of each."""


GEMMA = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_activation": None, "head_dim": 256}
QWEN = {"rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
DEFAULTS: dict[str, JsonObject] = {
    "gpt2": {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
    "llama": {"rms_norm_eps": 1e-6},
    "mistral": {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, "sliding_window": None,
                "num_experts_per_tok": 2, "num_local_experts": 8},
    "qwen2": {**QWEN, "num_key_value_heads": 32},
    "qwen3": {**QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {**QWEN, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
                  "num_experts": 128, "norm_topk_prob": False},
    "gemma": {**GEMMA, "num_key_value_heads": 16},
    "gemma2": {**GEMMA, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
               "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {**GEMMA, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
                    "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 1e6,
                    "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
    "phi3": {"rms_norm_eps": 1e-5, "sliding_window": None},
    "olmo2": {"rms_norm_eps": 1e-5},
}  # fmt: skip
COMMON = {"rope_theta": 10_000.0, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
          "mlp_bias": False, "num_key_value_heads": None, "head_dim": None}  # fmt: skip

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,), "alibi": (False,), "attention_multiplier": (), "clip_qkv": (),
    "attention_sink": (False, 0), "attention_sinks": (False, 0), "attn_temperature_tuning": (False, 0),
    "dim_model_base": (), "scale_depth": (), "scale_emb": (1, 1.0), "kv_lora_rank": (), "q_lora_rank": (),
    "logit_softcap": (), "logits_soft_cap": (), "no_rope_layers": (), "no_rope_layer_interval": (),
    "multi_query": (False,), "qk_layernorm": (False,), "use_qk_norm": (False,), "rotary_pct": (1.0,),
    "use_parallel_residual": (False,),
    "num_nextn_predict_layers": (0,), "first_k_dense_replace": (0,), "n_shared_experts": (0,), "layernorm_type": (),
    "embedding_multiplier": (1.0,), "logit_scale": (1.0,), "logits_scaling": (1.0,), "parallel_attn": (False,),
    "partial_rotary_factor": (1.0,), "quantization_config": (), "residual_multiplier": (1.0,),
    "scale_attn_by_inverse_layer_idx": (False,), "scale_attn_weights": (True,),
    "use_bidirectional_attention": (False,), "use_mrope": (False,),
}  # fmt: skip
"""Fields that dtrain's decoder does not support, with the values, besides null, at which they have no effect."""

IGNORED = {
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "initializer_range", "use_cache",
    "_name_or_path", "_attn_implementation", "cache_implementation", "auto_map", "id2label", "label2id",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "is_decoder",
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "router_jitter_noise",
    "output_router_logits", "router_aux_loss_coef", "pretraining_tp", "n_ctx", "reorder_and_upcast_attn",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "gradient_checkpointing", "sliding_window_size", "tokenizer_class", "output_attentions",
    "output_hidden_states", "return_dict",
    "chunk_size_feed_forward", "use_return_dict", "is_encoder_decoder", "problem_type",
}  # fmt: skip
"""Fields about training, saving and text, and fields that repeat others."""


@dataclass
class Fields:
    """The fields of a config.json; records which were read, and for which setting."""

    values: JsonObject
    defaults: Mapping[str, object]
    path: Path
    sources: dict[str, str] = field(default_factory=dict)
    unserved: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def __call__(self, name: str, ours: str = "") -> Any:
        """The field's value or its default; raises DataError if it has neither. `ours` is the setting it decides."""
        self.known.add(name)
        if name not in self.values and name not in self.defaults:
            raise DataError(f"{self.path} has no {name}", "use the config.json that belongs to the parameters")
        value = self.values.get(name, self.defaults.get(name))
        if isinstance(value, str) and name not in TEXTS:
            raise DataError(f"{self.path}: {name} is the text {value!r}, not a number", "write it without quotes")
        if ours:
            self.sources[ours] = f"{name}: {value}" + ("" if name in self.values else " (by default)")
        return value

    def refuse(self, problem: str) -> None:
        """Record a field and value that dtrain's decoder does not support."""
        self.unserved.append(problem)


TEXTS = ("hidden_act", "hidden_activation", "activation_function", "layer_type")
"""Fields whose values are texts."""
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
GEMMA_GELU = {None, "gelu", "gelu_new", "gelu_pytorch_tanh"}
"""Gemma's first files have `gelu` but mean its tanh form."""


@dataclass(frozen=True)
class Published:
    """A model as config.json describes it."""

    model: Any
    sources: Mapping[str, str]
    """For each setting of the model its source in config.json: "rms_norm_eps: 1e-06"."""
    unserved: tuple[str, ...]
    """Fields and values that dtrain's model does not support."""
    unchecked: tuple[str, ...]
    """Fields that dtrain does not recognise."""
    positions: int | None
    """The longest context that config.json states; None for a model of images."""


def published_model(config: JsonObject, context: int, path: Path) -> Published:
    """The decoder of a config.json, for rows of at most `context` tokens.

    Raises DataError if its architecture is not supported, or a field is missing or has an impossible value.
    """
    if config["model_type"] == "gemma3" and isinstance(config.get("text_config"), dict):  # with an image encoder
        config = {"model_type": "gemma3_text"} | config["text_config"]
    kind = str(config["model_type"])
    if kind not in DEFAULTS:
        named = ", ".join(config.get("architectures") or []) or "no architecture named"
        supported = ", ".join(sorted(DEFAULTS)) + "; of images vit, resnet, and timm's vit, deit and resnet"
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


def positions(fields: Fields) -> JsonObject:
    """The settings `position`, and `window_theta` where layers with a window have their own."""
    new = fields.values.get("rope_parameters") or {}
    fields.known |= {"rope_parameters", "rope_scaling"}
    if "rope_local_base_freq" not in fields.defaults:
        return {"position": _rope(fields, new)}
    local, local_theta = new.get("sliding_attention") or {}, fields("rope_local_base_freq", "window_theta")
    if local.get("rope_type", "default") != "default":
        fields.refuse(f"rope_parameters.sliding_attention.rope_type: {local['rope_type']}")
    if "rope_theta" in local:
        local_theta = local["rope_theta"]
        fields.sources["window_theta"] = f"rope_parameters.sliding_attention.rope_theta: {local_theta}"
    return {"position": _rope(fields, new.get("full_attention") or {}), "window_theta": local_theta}


def _rope(fields: Fields, new: JsonObject) -> Rope:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files."""
    old = fields.values.get("rope_scaling") or {}
    top = fields("rope_theta", "position.theta")
    if any(isinstance(value, dict) for value in new.values()):
        fields.refuse("rope_parameters: different values for some layers")
        return Rope()
    theta = new.get("rope_theta", top)
    if "rope_theta" in new:
        fields.sources["position.theta"] = f"rope_parameters.rope_theta: {theta}"
        if theta != fields.values.get("rope_theta", theta):
            fields.refuse(f"rope_theta: {top} but rope_parameters.rope_theta: {theta}")
    plain = {"rope_theta", "partial_rotary_factor"}
    scaled = {name: value for name, value in new.items() if name not in plain and value is not None}
    if new.get("partial_rotary_factor") not in (None, 1):
        fields.refuse(f"rope_parameters.partial_rotary_factor: {new['partial_rotary_factor']}")
    where, scaling = ("rope_parameters", scaled) if scaled else ("rope_scaling", dict(old))
    fields.sources["position.scaling"] = f"{where}: {scaling or None}"
    return Rope(theta=theta, scaling=_scaling(fields, scaling, where))


def _scaling(fields: Fields, values: JsonObject, where: str) -> LinearScaling | Llama3 | Yarn | None:
    kind = values.get("rope_type", values.get("type", "default"))
    known = SCALINGS.get(kind)
    if known is None:
        fields.refuse(f"{where}.rope_type: {kind}")
        return None
    for name in sorted(values.keys() - known - {"rope_type", "type"}):
        fields.refuse(f"{where}.{name}: {values[name]}")
    if kind == "linear":
        return LinearScaling(factor=values["factor"])
    if kind == "default":
        return None
    # transformers takes the one at the top of config.json first
    top = fields.values.get("original_max_position_embeddings")
    fields.known.add("original_max_position_embeddings")
    original = top or values.get("original_max_position_embeddings") or fields("max_position_embeddings")
    if kind == "llama3":
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        return Llama3(factor=values["factor"], low=low, high=high, original=original)
    fast, slow = values.get("beta_fast") or 32.0, values.get("beta_slow") or 1.0
    yarn = Yarn(factor=values["factor"], original=original, fast=fast, slow=slow)
    attention = values.get("attention_factor")
    if attention is not None and not math.isclose(attention, yarn.attention, rel_tol=1e-6):
        fields.refuse(f"{where}.attention_factor: {attention}")
    if not values.get("truncate", True):
        fields.refuse(f"{where}.truncate: False")
    return yarn
