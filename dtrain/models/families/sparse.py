"""The families with experts, by `model_type`; as in `dense`."""

from dataclasses import replace
from typing import TYPE_CHECKING

from dtrain.core.types import JsonObject
from dtrain.models.families.dense import (
    ATTENTION,
    ATTENTION_BIASES,
    GRANITE,
    JOINT,
    NONE,
    POST_ALONE,
    QWEN_WINDOWS,
    rotates_locally,
)
from dtrain.models.families.family import Family, whole_heads
from dtrain.models.families.fields import Fields
from dtrain.models.families.latent import latent, latent_rope
from dtrain.models.families.layers import (
    after_first,
    every,
    everywhere,
    first_of,
    of_some_versions,
    theta_of_layers,
    windows,
)
from dtrain.models.families.llama4 import LLAMA4
from dtrain.models.families.mixers import (
    LFM2,
    QWEN3_5,
    by_types,
    convolutions,
    experts_or_dense,
    mamba_layers,
    rotated_or_not,
)
from dtrain.models.families.part import Part
from dtrain.models.families.parts import (
    biases,
    ernie_dense,
    experts,
    first_dense,
    fixed,
    further_tokens,
    hunyuan_rope,
    known,
    minimax_rope,
    no_window,
    qwen_dense,
    renamed,
    rope,
    same,
    scaled_by_default,
    sizes,
    stated,
)
from dtrain.models.feed_forward import LIMIT, SLOPE
from dtrain.models.rope import Yarn

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

QWEN_EXPERTS = {
    "count": "num_experts", "active": "num_experts_per_tok", "hidden": "moe_intermediate_size",
    "renormalise": "norm_topk_prob",
}  # fmt: skip
QWEN_SIZES = {
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
}  # fmt: skip
DEEPSEEK_EXPERTS = {
    "count": "n_routed_experts", "active": "num_experts_per_tok", "hidden": "moe_intermediate_size",
    "renormalise": "norm_topk_prob", "shared": "n_shared_experts", "scale": "routed_scaling_factor",
    "groups": "n_group", "active_groups": "topk_group",
}  # fmt: skip
DEEPSEEK_SIZES = {
    "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "norm_topk_prob": True,
    "n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DEEPSEEK = {"score": "sigmoid", "bias": True}
DEEPSEEK_V3 = (
    stated(attention_bias=False, scoring_func="sigmoid", topk_method="noaux_tc"),
    known("moe_layer_freq", "ep_size", "aux_loss_alpha", "seq_aux"),
)  # fmt: skip
GRANITE_EXPERTS = {"count": "num_local_experts", "active": "num_experts_per_tok", "hidden": "intermediate_size"}
GRANITE_SIZES = {"num_local_experts": 8, "num_experts_per_tok": 2}


def deepseek_v2_experts() -> Part:
    """Experts by their softmax; in groups where `topk_method` says so, each ranked by its best expert."""
    method, limited = "topk_method", "group_limited_greedy"
    plain = experts(
        {ours: theirs for ours, theirs in DEEPSEEK_EXPERTS.items() if "group" not in ours and ours != "renormalise"},
        {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1407, "n_shared_experts": 2,
         "routed_scaling_factor": 1.0}, renormalise=False)  # fmt: skip

    def read(fields: Fields) -> JsonObject:
        found, how = plain.read(fields), fields.values.get(method, "greedy")
        fields.known |= {method, "n_group", "topk_group", "norm_topk_prob", "moe_layer_freq", "ep_size",
                         "aux_loss_alpha", "seq_aux"}  # fmt: skip
        if fields.values.get("norm_topk_prob"):
            fields.refuse("norm_topk_prob: True")
        if fields.values.get("scoring_func", "softmax") != "softmax" or how not in ("greedy", limited):
            fields.refuse(f"topk_method: {how}, scoring_func: {fields.values.get('scoring_func')}")
        fields.known.add("scoring_func")
        if how != limited:
            return found
        groups = {"groups": fields("n_group"), "active_groups": fields("topk_group"), "group_by": 1}
        return {"experts": replace(found["experts"], **groups)}

    def write(model: "Decoder") -> JsonObject:
        if (own := model.experts) is None:
            return {}
        config = plain.write(model) | {"norm_topk_prob": False, method: limited if own.groups > 1 else "greedy"}
        return config | {"n_group": own.groups, "topk_group": own.active_groups}

    return Part(plain.defaults, read, write)


SPARSE: dict[str, Family] = {
    "mixtral": Family(
        "MixtralForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=8), rope(1e6), NONE,
         windows(everywhere, None, own_types=False),
         experts({"count": "num_local_experts", "active": "num_experts_per_tok", "hidden": "intermediate_size"},
                 {"num_experts_per_tok": 2, "num_local_experts": 8})),
        "mixtral",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (*sizes(kv_heads=4, head_dim=128), rope(), ATTENTION_BIASES, fixed(qk_norm=True), qwen_dense(),
         of_some_versions(QWEN_WINDOWS), experts(QWEN_EXPERTS, QWEN_SIZES)),
        "qwen3_moe",
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5)), rope(), ATTENTION_BIASES, JOINT, same("qkv_clip", "clip_qkv", None),
         experts(QWEN_EXPERTS | {"hidden": "intermediate_size"},
                 {"num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False})),
        "qwen3_moe",
    ),
    "flex_olmo": Family(
        "FlexOlmoForCausalLM",
        (*sizes(), rope(500_000.0), ATTENTION_BIASES, POST_ALONE, JOINT,
         experts(QWEN_EXPERTS | {"hidden": "intermediate_size"},
                 {"num_experts_per_tok": 5, "num_experts": 7, "norm_topk_prob": False})),
        "flex_olmo",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        (*sizes(kv_heads=16), rope(), biases(qkv_bias=("qkv_bias", True)), qwen_dense(),
         no_window("use_sliding_window"),
         experts(QWEN_EXPERTS | {"shared": "shared_expert_intermediate_size"},
                 {"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False,
                  "shared_expert_intermediate_size": 5632}, shared_gate=True)),
        "qwen2_moe", opens=whole_heads,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        (*sizes(kv_heads=32), rope(), ATTENTION_BIASES, fixed(qk_norm=True), windows(after_first, 4096, first=62),
         first_dense(0),
         experts(DEEPSEEK_EXPERTS, DEEPSEEK_SIZES | {"norm_topk_prob": False, "n_shared_experts": None}, **DEEPSEEK)),
        "deepseek",
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=8), rope(partial=0.5), first_dense(1),
         further_tokens(written=True),
         biases(qkv_bias=ATTENTION), same("qk_norm", "use_qk_norm", False),
         experts(DEEPSEEK_EXPERTS, DEEPSEEK_SIZES, **DEEPSEEK)),
        "deepseek",
    ),
    "solar_open": Family(
        "SolarOpenForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=8, head_dim=128), rope(1e6), biases(qkv_bias=ATTENTION),
         known("intermediate_size"),
         experts(DEEPSEEK_EXPERTS, DEEPSEEK_SIZES | {"moe_intermediate_size": 1280}, **DEEPSEEK)),
        "deepseek",
    ),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=32), rope(), NONE, fixed(qk_norm=True), first_dense(1),
         further_tokens(),
         windows(every(4, "sliding_window_pattern"), 4096, rotates=rotates_locally, always=True),
         experts(DEEPSEEK_EXPERTS | {"count": "num_experts", "shared": "num_shared_experts"},
                 {"num_experts": 64, "num_shared_experts": 1, "moe_intermediate_size": 1024, "norm_topk_prob": True,
                  "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1}, **DEEPSEEK)),
        "exaone_moe",
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        (*sizes(kv_heads=8, head_dim=128), minimax_rope(), NONE, JOINT,
         stated(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True),
         experts({"count": "num_local_experts", "active": "num_experts_per_tok", "hidden": "intermediate_size"},
                 {"num_local_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1536}, **DEEPSEEK)),
        "minimax_m2",
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5)), hunyuan_rope(), ATTENTION_BIASES,
         fixed(qk_norm=True, qk_norm_rotated=True), stated(use_qk_norm=True),
         experts({"count": "num_experts", "active": "moe_topk", "hidden": "intermediate_size"},
                 {"num_experts": 1, "moe_topk": 1}, shared=1)),
        "hunyuan_v1_moe",
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        (*sizes(), latent(), latent_rope(field=False), first_dense(0), stated(attention_bias=False, mlp_bias=False),
         further_tokens(), deepseek_v2_experts()),
        "deepseek",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        (*sizes(), latent(), latent_rope(), first_dense(3), further_tokens(written=True), *DEEPSEEK_V3,
         experts(DEEPSEEK_EXPERTS, DEEPSEEK_SIZES | {"n_routed_experts": 256, "moe_intermediate_size": 2048,
                                                     "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
                 **DEEPSEEK)),
        "deepseek",
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5)), latent(query_rank=768, nope=192, value=256), latent_rope(),
         first_dense(1, by_type=True), further_tokens(), *DEEPSEEK_V3,
         experts(DEEPSEEK_EXPERTS, DEEPSEEK_SIZES | {"n_routed_experts": 64, "moe_intermediate_size": 1536,
                                                     "num_experts_per_tok": 4, "routed_scaling_factor": 1.8},
                 **DEEPSEEK)),
        "deepseek",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=8, head_dim=64, act=None), stated(hidden_act="silu"),
         scaled_by_default(Yarn(factor=32.0, original=4096, truncate=False), 150_000.0),
         stated(swiglu_limit=LIMIT, swiglu_alpha=SLOPE),
         biases(qkv_bias=("attention_bias", True), out_bias=("attention_bias", True)),
         windows(every(2), 128, always=True, number=True), fixed(feed_forward="swiglu_clamped", sinks=True),
         known("experts_per_token", "initial_context_length"),
         experts({"count": "num_local_experts", "active": "num_experts_per_tok", "hidden": "intermediate_size"},
                 {"num_local_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 2880},
                 biases=True, router_bias=True)),
        "gpt_oss",
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        (*sizes(), rope(), ATTENTION_BIASES, *GRANITE, experts(GRANITE_EXPERTS, GRANITE_SIZES)),
        "granitemoe", opens=whole_heads,
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM",
        (*sizes(), rope(), ATTENTION_BIASES, *GRANITE,
         experts(GRANITE_EXPERTS | {"shared": "shared_intermediate_size"},
                 GRANITE_SIZES | {"shared_intermediate_size": 0})),
        "granitemoe", opens=whole_heads,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        (*sizes(), rotated_or_not(), ATTENTION_BIASES, *GRANITE, mamba_layers(),
         stated(mamba_conv_bias=True, mamba_proj_bias=False, normalization_function="rmsnorm"), known("init_method"),
         experts_or_dense(experts(GRANITE_EXPERTS | {"shared": "shared_intermediate_size"},
                                  GRANITE_SIZES | {"shared_intermediate_size": 1024}),
                          "num_local_experts", "shared_intermediate_size")),
        "granitemoehybrid", opens=whole_heads,
    ),
    "granitemoe_swa": Family(
        "GraniteMoeSWAForCausalLM",
        (*sizes(), theta_of_layers(first_of(4), 128), ATTENTION_BIASES, *GRANITE, fixed(sinks=True),
         experts(GRANITE_EXPERTS | {"shared": "shared_intermediate_size"},
                 GRANITE_SIZES | {"shared_intermediate_size": 0})),
        "granitemoe_swa",
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=4, tied=True), rope(500_000.0, interleaved=True), NONE,
         stated(use_bias=False), known("moe_norm_min"), ernie_dense(),
         renamed(num_experts="moe_num_experts", num_experts_per_tok="moe_k"),
         experts({"count": "moe_num_experts", "active": "moe_k", "hidden": "moe_intermediate_size",
                  "shared": "moe_num_shared_experts"},
                 {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
                 bias=True)),
        "ernie4_5_moe", opens=whole_heads,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        (*sizes(kv_heads=2, head_dim=256), *QWEN3_5,
         experts({ours: theirs for ours, theirs in QWEN_EXPERTS.items() if ours != "renormalise"}
                 | {"shared": "shared_expert_intermediate_size"},
                 {"moe_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
                  "shared_expert_intermediate_size": 512}, shared_gate=True)),
        "qwen3_5_moe",
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        (*sizes(kv_heads=2, head_dim=256), *QWEN3_5, stated(decoder_sparse_step=1, use_sliding_window=False),
         known("intermediate_size"),
         experts(QWEN_EXPERTS | {"shared": "shared_expert_intermediate_size"},
                 {"moe_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
                  "shared_expert_intermediate_size": 512}, shared_gate=True)),
        "qwen3_next",
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        (*LFM2, convolutions(by_types), first_dense(2, name="num_dense_layers"), stated(use_expert_bias=True),
         experts({"count": "num_experts", "active": "num_experts_per_tok", "hidden": "moe_intermediate_size",
                  "renormalise": "norm_topk_prob", "scale": "routed_scaling_factor"},
                 {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "norm_topk_prob": True,
                  "routed_scaling_factor": 1.0}, **DEEPSEEK)),
        "lfm2", opens=whole_heads,
    ),
    "llama4_text": Family("Llama4ForCausalLM", LLAMA4, "llama4"),
    "hy_v3": Family(
        "HYV3ForCausalLM",
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=8, head_dim=128), rope(11_158_840.0), ATTENTION_BIASES,
         fixed(qk_norm=True), stated(mlp_bias=False), known("enable_moe_fp32_combine"), first_dense(1, by_type=True),
         further_tokens(),
         experts({"count": "num_experts", "active": "num_experts_per_tok", "hidden": "moe_intermediate_size",
                  "shared": "num_shared_experts", "scale": "router_scaling_factor"},
                 {"num_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "num_shared_experts": 1,
                  "router_scaling_factor": 2.826}, **DEEPSEEK)),
        "hy_v3",
    ),
}  # fmt: skip
