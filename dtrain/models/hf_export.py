"""Write the config.json with which Hugging Face's `transformers` computes the same as a decoder, if there is one."""

from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject
from dtrain.models.decoder import Decoder
from dtrain.models.hf_config import ACTIVATIONS, GPT2_ACTIVATIONS, published_model
from dtrain.models.rope import Learned, LinearScaling, Llama3, Rope, Yarn
from dtrain.models.settings import differing, settings

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def config_of(model: Decoder) -> dict[str, object] | None:
    """The fields of config.json; None if no supported architecture computes the same.

    Each candidate is read back with `published_model` and accepted only if it gives this decoder.
    """
    for kind, architecture in ARCHITECTURES.items():
        if isinstance(model.position, Learned) != (kind == "gpt2") or not _opens(model, kind):
            continue
        config = {"architectures": [architecture], "model_type": kind} | _fields(model, kind)
        try:
            published = published_model(config, model.context, Path("config.json"))
        except DataError:
            continue
        if not published.unserved and not differing(settings(model), settings(published.model), model.context):
            return config
    return None


def _opens(model: Decoder, kind: str) -> bool:
    """Whether versions 4.57 and 5 of transformers both open such a config.json, and compute the same from it."""
    scalar, scaling = model.query_pre_attn_scalar, getattr(model.position, "scaling", None)
    if kind == "gpt2":
        return model.tied  # an output head of its own has no name that both read
    if kind in ("gemma2", "gemma3_text"):
        return scalar is None or scalar == int(scalar)  # 5 takes whole numbers alone
    if kind == "olmo2":  # 4.57 takes linear scaling alone, by a factor above 1
        return scaling is None or (isinstance(scaling, LinearScaling) and scaling.factor > 1)
    return True


def _fields(model: Decoder, kind: str) -> dict[str, object]:
    if kind == "gpt2":
        return _gpt2(model)
    act = {form: name for name, form in reversed(ACTIVATIONS.items())}.get(model.feed_forward)
    config: dict[str, Any] = {
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "hidden_size": model.width,
        "intermediate_size": model.experts.hidden if model.experts else model.hidden or 4 * model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.head_size,
        "rms_norm_eps": model.epsilon,
        "tie_word_embeddings": model.tied,
        "hidden_act": act,
        **(_rope(model.position) if isinstance(model.position, Rope) else {}),
    }
    config |= {"attention_bias": model.bias} if kind not in ("mistral", "mixtral", "qwen2") else {}
    config |= {"mlp_bias": model.bias} if kind == "llama" else {}
    if kind in ("mistral", "mixtral", "gemma2", "gemma3_text") or kind.startswith("qwen"):
        config |= _windows(model, kind)
    if kind == "olmo2" and config.get("rope_scaling"):  # 4.57 takes these two keys alone
        config["rope_scaling"] = {"type": "linear", "factor": float(config["rope_scaling"]["factor"])}
    if kind.startswith("gemma"):
        config["hidden_activation"] = act
    if kind == "gemma3_text":
        config["rope_parameters"] = _rope_of_layers(model)
        config |= {"sliding_window_pattern": model.global_every or model.layers + 1}
        config["rope_local_base_freq"] = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    if kind in ("gemma2", "gemma3_text"):
        scalar = model.query_pre_attn_scalar or model.head_size
        config["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
        config["attn_logit_softcapping"] = model.attention_softcap
        config["final_logit_softcapping"] = model.logit_softcap
    return config | _experts(model, kind)


def _gpt2(model: Decoder) -> dict[str, object]:
    acts = {form: name for name, form in reversed(GPT2_ACTIVATIONS.items())}
    return {
        "vocab_size": model.vocab,
        "n_positions": model.context if isinstance(model.position, Learned) else None,
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.hidden,
        "activation_function": acts.get(model.feed_forward),
        "layer_norm_epsilon": model.epsilon,
        "tie_word_embeddings": model.tied,
    }


def _windows(model: Decoder, kind: str) -> dict[str, object]:
    config: dict[str, Any] = {"sliding_window": model.window}
    if kind.startswith("qwen"):
        config |= {"use_sliding_window": model.window is not None, "max_window_layers": 0}
    if model.global_every and kind != "gemma2":  # Gemma 2's default already has every second layer attend to all keys
        types = ["sliding_attention"] * (model.global_every - 1) + ["full_attention"]
        config["layer_types"] = (types * model.layers)[: model.layers]
    elif kind == "gemma3_text":
        config["layer_types"] = ["sliding_attention"] * model.layers
    return config


def _experts(model: Decoder, kind: str) -> dict[str, object]:
    experts = model.experts
    if experts is None:
        return {}
    if kind == "mixtral":
        return {"num_local_experts": experts.count, "num_experts_per_tok": experts.active}
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.hidden,
        "norm_topk_prob": experts.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope_of_layers(model: Decoder) -> JsonObject:
    """The rotary positions of layers with and without a window."""
    position = model.position
    assert isinstance(position, Rope)
    plain = _rope(position)
    full = {"rope_theta": plain["rope_theta"], **(plain["rope_scaling"] or {"rope_type": "default"})}
    local = {"rope_type": "default", "rope_theta": model.window_theta or position.theta}
    return {"full_attention": full, "sliding_attention": local}


def _rope(position: Rope) -> JsonObject:
    """The fields of `position` in the spelling that older and newer versions of transformers read."""
    scaling = position.scaling
    if scaling is None:
        return {"rope_theta": position.theta, "rope_scaling": None}
    config: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    match scaling:
        case Llama3():
            config |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
            config["original_max_position_embeddings"] = scaling.original
        case Yarn():
            config |= {"beta_fast": scaling.fast, "beta_slow": scaling.slow}
            config["original_max_position_embeddings"] = scaling.original
        case LinearScaling():
            pass
    return {"rope_theta": position.theta, "rope_scaling": config}
