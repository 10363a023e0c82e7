"""The fields of a Hugging Face config.json: those that dtrain reads, their defaults, and those that it ignores.

The defaults are those of each model type's configuration class in `transformers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject

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
        if ours:
            self.sources[ours] = f"{name}: {value}" + ("" if name in self.values else " (by default)")
        return value

    def refuse(self, problem: str) -> None:
        """Record a field and value that dtrain's decoder does not support."""
        self.unserved.append(problem)
