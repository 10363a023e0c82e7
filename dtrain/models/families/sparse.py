"""The families with experts, by `model_type`; as in `dense`."""

from dtrain.models.families.dense import (
    ATTENTION,
    ATTENTION_BIASES,
    JOINT,
    NONE,
    POST_ALONE,
    QWEN_WINDOWS,
    rotates_locally,
    whole_heads,
)
from dtrain.models.families.family import Family
from dtrain.models.families.layers import (
    after_first,
    every,
    everywhere,
    of_some_versions,
    windows,
)
from dtrain.models.families.parts import (
    biases,
    experts,
    first_dense,
    fixed,
    further_tokens,
    hunyuan_rope,
    known,
    minimax_rope,
    no_window,
    qwen_dense,
    rope,
    same,
    sizes,
    stated,
)

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
        (*sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=8), rope(partial=0.5), first_dense(1), further_tokens(),
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
}  # fmt: skip
