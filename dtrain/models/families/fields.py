"""The fields of a config.json, and an account of which of them were used."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject

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
"""Fields that a family does not read and that would matter, with the values, besides null, at which they do not."""

IGNORED = {
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "initializer_range", "use_cache",
    "_name_or_path", "_attn_implementation", "cache_implementation", "auto_map", "id2label", "label2id",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "is_decoder",
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "router_jitter_noise",
    "residual_dropout", "embedding_dropout", "eod_token_id",
    "output_router_logits", "router_aux_loss_coef", "pretraining_tp", "n_ctx", "reorder_and_upcast_attn",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "gradient_checkpointing", "sliding_window_size", "tokenizer_class", "output_attentions",
    "output_hidden_states", "return_dict",
    "chunk_size_feed_forward", "use_return_dict", "is_encoder_decoder", "problem_type",
}  # fmt: skip
"""Fields about training, saving and text, and fields that repeat others."""
TEXTS = ("hidden_act", "hidden_activation", "activation_function", "layer_type")
"""Fields whose values are texts."""


@dataclass
class Fields:
    """The fields of a config.json; records which were read, and for which setting."""

    values: JsonObject
    defaults: Mapping[str, object]
    path: Path
    context: int = 0
    """The longest row that the model will see."""
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

    def maybe(self, name: str) -> Any:
        """The field's value, or None."""
        self.known.add(name)
        return self.values.get(name)

    def refuse(self, problem: str) -> None:
        """Record a field and value that dtrain's decoder does not support."""
        self.unserved.append(problem)

    def refuse_unread(self) -> None:
        """Record the fields that would matter and that nothing has read."""
        for name, neutral in NEUTRAL.items():
            if name not in self.known and self.values.get(name) is not None and self.values[name] not in neutral:
                self.refuse(f"{name}: {self.values[name]}")

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Fields that dtrain does not recognise."""
        return tuple(sorted(self.values.keys() - self.known - IGNORED - NEUTRAL.keys()))


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
