"""The families without experts, by `model_type`: one entry each, from which config.json is read and written.

The defaults of fields are those of the configuration classes of transformers 5.23. In this order a model is exported as
the first that computes the same.
"""

from typing import TYPE_CHECKING

from dtrain.core.types import JsonObject
from dtrain.models.families.family import Family, whole_heads
from dtrain.models.families.fields import Fields
from dtrain.models.families.gemma3n import GEMMA3N
from dtrain.models.families.gemma4 import gemma4
from dtrain.models.families.latent import latent, latent_rope
from dtrain.models.families.layers import (
    FULL,
    LOCAL,
    after_first,
    every,
    everywhere,
    first_of,
    own_rotation,
    settings,
    theta_of_layers,
    window_of,
    windows,
)
from dtrain.models.families.mixers import LFM2, QWEN3_5, adjusted_width, by_numbers, convolutions, mamba_layers
from dtrain.models.families.part import Part
from dtrain.models.families.parts import (
    LAYER_NORM,
    UNGATED,
    biases,
    dense,
    divided,
    fixed,
    gemma_activation,
    growing_rope,
    hunyuan_rope,
    known,
    linear_rope_alone,
    rope,
    same,
    scaled_by_default,
    sizes,
    stated,
)
from dtrain.models.layer_pattern import LayerKind
from dtrain.models.rope import LinearScaling, Llama3, NoPosition

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder


def _whole_scalar(model: "Decoder") -> bool:
    return model.query_pre_attn_scalar is None or model.query_pre_attn_scalar == int(model.query_pre_attn_scalar)


def _scalar() -> Part:
    """The scalar of attention, which version 5 of transformers takes as a whole number alone."""

    def write(model: "Decoder") -> JsonObject:
        scalar = model.query_pre_attn_scalar or model.head_size
        return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}

    plain = same("query_pre_attn_scalar", "query_pre_attn_scalar", 256)
    return Part(plain.defaults, plain.read, write)


def _attention_multiplier() -> Part:
    """The factor of the scores, which must be a number."""
    factor = same("attention_multiplier", "attention_multiplier", 1.0)

    def write(model: "Decoder") -> JsonObject:
        return {"attention_multiplier": model.attention_multiplier or model.head_size**-0.5}

    return Part(factor.defaults, factor.read, write)


def _no_attention_cap() -> Part:
    """A field that transformers does not apply (Gemma 3)."""
    cap = same("attention_softcap", "attn_logit_softcapping", None)

    def read(fields: Fields) -> JsonObject:
        found = cap.read(fields)
        if found["attention_softcap"] is not None:
            fields.refuse(f"attn_logit_softcapping: {found['attention_softcap']}")
        return found

    return Part(cap.defaults, read, cap.write)


def _smollm3_layers() -> Part:
    """Each fourth layer, or those of `no_rope_layers`, do not rotate."""

    def read(fields: Fields) -> JsonObject:
        layers, every_n = fields("num_hidden_layers"), fields("no_rope_layer_interval")
        fields.known.add("sliding_window")
        rotates = (fields.maybe("no_rope_layers") or [])[:layers] or [
            number % every_n != 0 for number in range(1, layers + 1)
        ]
        window = fields("sliding_window", "window") if fields("use_sliding_window") else None
        types = fields.maybe("layer_types") or [LOCAL if window and not turns else FULL for turns in rotates]
        if len(types) != layers or len(rotates) != layers or set(types) - {LOCAL, FULL}:
            fields.refuse(f"no_rope_layers, layer_types: {len(rotates)} and {len(types)} for {layers} layers")
            return {}
        fields.sources["pattern"] = f"no_rope_layers: {rotates}, layer_types: {', '.join(sorted(set(types)))}"
        return settings(
            [
                LayerKind(window=window if kind == LOCAL else None, position=None if turns else NoPosition())
                for kind, turns in zip(types, rotates, strict=True)
            ],
            fields.context,
        )

    def write(model: "Decoder") -> JsonObject:
        window = window_of(model)
        return {
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "layer_types": [LOCAL if kind.window else FULL for kind in model.kinds],
            "no_rope_layers": [int(not isinstance(kind.position, NoPosition)) for kind in model.kinds],
        }

    return Part({"sliding_window": None, "use_sliding_window": False, "no_rope_layer_interval": 4}, read, write)


ATTENTION = ("attention_bias", False)
LLAMA_BIASES = biases(qkv_bias=ATTENTION, out_bias=ATTENTION, mlp_bias=("mlp_bias", False))
ATTENTION_BIASES = biases(qkv_bias=ATTENTION, out_bias=ATTENTION)
NONE = biases()
POST = fixed(post_norm=True)
POST_ALONE = fixed(post_norm=True, pre_norm=False)
JOINT = fixed(qk_norm=True, qk_norm_joint=True)
GEMMA = (gemma_activation(), ATTENTION_BIASES, fixed(norm_offset=True, embed_scale=True), dense())
GEMMA2 = (*sizes(head_dim=256, kv_heads=4, tied=True, act=None), *GEMMA)
GRANITE = (
    same("embed_multiplier", "embedding_multiplier", 1.0), same("residual_multiplier", "residual_multiplier", 1.0),
    _attention_multiplier(), divided("logit_multiplier", "logits_scaling", 1.0),
)  # fmt: skip
COHERE = (
    *sizes(epsilon=("layer_norm_eps", 1e-5), tied=True), ATTENTION_BIASES,
    fixed(norm="layer", parallel=True), same("logit_multiplier", "logit_scale", 0.0625), dense(),
)  # fmt: skip
CAPS = (
    same("attention_softcap", "attn_logit_softcapping", 50.0), same("logit_softcap", "final_logit_softcapping", 30.0),
)  # fmt: skip
ONE_WINDOW = windows(everywhere, None, own_types=False)
QWEN_WINDOWS = windows(after_first, 4096, switch=True, first=28)
STARCODER_GELUS = {"gelu_pytorch_tanh": "gelu_tanh"} | UNGATED
"""The name that is written comes first."""


def _linear_or_none(model: "Decoder") -> bool:
    """Whether version 4.57 of transformers takes the scaling of the rotation, of which it knows two fields."""
    scaling = getattr(model.position, "scaling", None)
    return scaling is None or (isinstance(scaling, LinearScaling) and scaling.factor > 1)


def rotates_locally(kind: str, window: int | None) -> bool:
    """Whether a layer rotates where only those with a window do; all, if there is no window."""
    return window is None or kind == LOCAL


DENSE: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", (*sizes(), rope(), LLAMA_BIASES, dense())),
    "mistral": Family(
        "MistralForCausalLM", (*sizes(kv_heads=8), rope(), NONE, windows(everywhere, 4096), dense())
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        (*sizes(kv_heads=32), rope(), biases(qkv_bias=True), QWEN_WINDOWS, dense()),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        (*sizes(kv_heads=32, head_dim=128), rope(), ATTENTION_BIASES, fixed(qk_norm=True),
         QWEN_WINDOWS, dense()),
    ),
    "gemma": Family(
        "GemmaForCausalLM", (*sizes(head_dim=256, kv_heads=16, tied=True, act=None), *GEMMA, rope())
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        (*GEMMA2, rope(), POST, windows(every(2), 4096, number=True), _scalar(),
         *CAPS),
        "gemma2", opens=_whole_scalar,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        (*GEMMA2, POST, fixed(qk_norm=True), own_rotation(every(6, "sliding_window_pattern"), 4096, 1e6, 1e4),
         _scalar(), _no_attention_cap(), same("logit_softcap", "final_logit_softcapping", None)),
        "gemma2", opens=_whole_scalar,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5)), linear_rope_alone(), ATTENTION_BIASES, POST_ALONE, JOINT, dense()),
        "gemma2",
        opens=_linear_or_none,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5)), rope(), NONE, ONE_WINDOW,
         known("original_max_position_embeddings"), dense()),
        "phi3", written=False,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5)), own_rotation(every(4), 4096, 500_000.0, 500_000.0), ATTENTION_BIASES,
         POST_ALONE, JOINT, dense()),
        "gemma2",
        opens=lambda model: len({rope.theta for rope in model.ropes}) < 2,  # 4.57 has one theta for all layers
    ),
    "olmo": Family(
        "OlmoForCausalLM",
        (*sizes(epsilon=None), linear_rope_alone(), ATTENTION_BIASES,
         fixed(norm="layer", norm_scale=False, epsilon=1e-5), same("qkv_clip", "clip_qkv", None), dense()),
        opens=_linear_or_none,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", (*sizes(kv_heads=4, tied=True), rope(2e6), LLAMA_BIASES, _smollm3_layers(), dense())
    ),
    "granite": Family("GraniteForCausalLM", (*sizes(), rope(), LLAMA_BIASES, *GRANITE, dense())),
    "ministral": Family(
        "MinistralForCausalLM", (*sizes(kv_heads=8), rope(), NONE, windows(everywhere, 4096), dense()), written=False
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=8, head_dim=128), growing_rope(), NONE,
         ONE_WINDOW, dense()),
    ),
    "glm": Family(
        "GlmForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1.5625e-7), kv_heads=2, head_dim=128), rope(partial=0.5, interleaved=True),
         biases(qkv_bias=("attention_bias", True)), dense()),
        "glm",
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1.5625e-7), kv_heads=2, head_dim=128), rope(partial=0.5, interleaved=True),
         biases(qkv_bias=("attention_bias", True)), POST, dense()),
        "glm4",
    ),
    "cohere": Family("CohereForCausalLM", (*COHERE, rope(500_000.0, interleaved=True))),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        (*COHERE, rope(interleaved=True),
         windows(every(4, "sliding_window_pattern"), 4096, always=True,
                 rotates=lambda kind, window: kind == LOCAL and window is not None)),
        opens=whole_heads,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=32), rope(), NONE, POST_ALONE, fixed(qk_norm=True),
         windows(every(4, "sliding_window_pattern"), 4096, rotates=rotates_locally, always=True), dense()),
        "gemma2",
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        (*sizes(kv_heads=8, head_dim=128), rope(), dense(),
         biases(qkv_bias=("attention_bias", True), out_bias=("attention_out_bias", False),
                mlp_bias=("mlp_bias", False))),
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        (*sizes(epsilon=("norm_epsilon", 1e-5), kv_heads=2, tied=True, act="gelu_pytorch_tanh", acts=STARCODER_GELUS),
         rope(), LAYER_NORM, ONE_WINDOW, dense(),
         biases(qkv_bias=("use_bias", True), out_bias=("use_bias", True), mlp_bias=("use_bias", True))),
        "starcoder2",
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=2, head_dim=128, tied=True), rope(500_000.0, interleaved=True),
         biases(qkv_bias=("use_bias", False), out_bias=("use_bias", False), mlp_bias=("use_bias", False)), dense()),
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        (*sizes(epsilon=("norm_eps", 1e-5), act="relu2", acts=UNGATED), rope(partial=0.5), LLAMA_BIASES,
         fixed(norm="layer", norm_bias=True, norm_offset=True), dense()),
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), act="relu2", acts=UNGATED), rope(), LLAMA_BIASES, dense()),
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5)), hunyuan_rope(), ATTENTION_BIASES,
         fixed(qk_norm=True, qk_norm_rotated=True), stated(use_qk_norm=True), dense()),
        "hunyuan_v1_dense",
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        (*sizes(epsilon=("layer_norm_eps", 1e-5), kv_heads=32), rope(partial=0.25), LAYER_NORM,
         biases(qkv_bias=("use_qkv_bias", False)), same("parallel", "use_parallel_residual", False), dense()),
        opens=whole_heads,
    ),
    "helium": Family(
        "HeliumForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-8), kv_heads=20, head_dim=128), rope(100_000.0, interleaved=True),
         biases(qkv_bias=ATTENTION, mlp_bias=("mlp_bias", False)), dense()),
        opens=whole_heads,
    ),
    "cwm": Family(
        "CwmForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=8, head_dim=128), NONE, known("mlp_bias"),
         scaled_by_default(Llama3(factor=16.0, low=1.0, high=4.0, original=8192), 1e6),
         windows(first_of(4), 8192, always=True), dense()),
    ),
    "vaultgemma": Family(
        "VaultGemmaForCausalLM",
        (*GEMMA2, rope(), windows(every(2), 4096, number=True), _scalar(),
         *CAPS),
        "gemma2", opens=_whole_scalar,
    ),
    "youtu": Family(
        "YoutuForCausalLM",
        (*sizes(tied=True), latent(), latent_rope(), stated(attention_bias=False), dense()),
    ),
    "jais2": Family(
        "Jais2ForCausalLM",
        (*sizes(epsilon=("layer_norm_eps", 1e-5), act="relu2", acts=UNGATED), rope(), LAYER_NORM,
         biases(qkv_bias=("attention_bias", True), out_bias=("attention_bias", True), mlp_bias=("mlp_bias", True)),
         dense()),
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", (*sizes(kv_heads=4, head_dim=256), *QWEN3_5, dense()), "qwen3_5",
    ),
    "gemma3n_text": Family("Gemma3nForCausalLM", GEMMA3N, "gemma3n"),
    "gemma4_text": Family("Gemma4ForCausalLM", gemma4(512, 256), "gemma4"),
    "gemma4_unified_text": Family("Gemma4UnifiedForCausalLM", gemma4(1024, 0), "gemma4", written=False),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        (*LFM2, convolutions(by_numbers), adjusted_width()),
        "lfm2", opens=whole_heads,
    ),
    "bamba": Family(
        "BambaForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=8), rope(partial=0.5),
         biases(together=False, qkv_bias=ATTENTION, out_bias=ATTENTION, mlp_bias=("mlp_bias", False)),
         mamba_layers("attn_layer_indices"), stated(mamba_conv_bias=True, mamba_proj_bias=False),
         stated(partial_rotary_factor=0.5), known("num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb"),
         dense()),
        "bamba", opens=whole_heads,
    ),
    "granite_swa": Family(
        "GraniteSWAForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=4, tied=True), theta_of_layers(first_of(4), 128), LLAMA_BIASES,
         *GRANITE, fixed(sinks=True), dense()),
    ),
}  # fmt: skip
