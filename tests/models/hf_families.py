"""The published families that are compared with Hugging Face's `transformers`: their `model_type` and fields."""

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
          "num_key_value_heads": 4}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
         "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3}  # fmt: skip
GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 96}
OTHER_GPT = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_inner": 40, "vocab_size": 97}
OTHER = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 3,
}  # fmt: skip
"""Other sizes: none of them a power of two."""
OF_LAYERS = ("layer_types", "layer_rope_theta", "num_hidden_layers")
FAMILIES = {
    "gpt2": ("gpt2", {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "llama2": ("llama", {"rms_norm_eps": 1e-5}),
    "llama3": ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("llama", {"rope_scaling": dict(YARN)}),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 24}),
    "mixtral": ("mixtral", {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"head_dim": 24, "rope_theta": 1e6}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                                "moe_intermediate_size": 48, "norm_topk_prob": True}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8,
                               "num_hidden_layers": 8, "sliding_window_pattern": 6}),
    "phi3": ("phi3", {"sliding_window": 16}),
    "olmo2": ("olmo2", {"rope_theta": 5e5}),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmo3": ("olmo3", {"sliding_window": 8, "rope_theta": 5e5, "num_hidden_layers": 6, "rope_scaling": dict(YARN)}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0, "intermediate_size": 48}),
    "flex-olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}),
    "qwen3-moe-dense": ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                                      "moe_intermediate_size": 48, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "qwen2-moe": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                                "shared_expert_intermediate_size": 96, "mlp_only_layers": [2]}),
    "dots1": ("dots1", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
                        "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
                        "routed_scaling_factor": 2.5, "sliding_window": 8, "max_window_layers": 2}),
    "glm4-moe": ("glm4_moe", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                              "first_k_dense_replace": 2, "use_qk_norm": True, "attention_bias": True,
                              "num_nextn_predict_layers": 0}),
    "solar-open": ("solar_open", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                                  "head_dim": 16}),
    "exaone-moe": ("exaone_moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                                  "sliding_window": 8, "num_hidden_layers": 6}),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48,
                                  "head_dim": 16}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "smollm3": ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 6}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.3,
                            "attention_multiplier": 0.2, "mlp_bias": True}),
    "ministral": ("ministral", {"sliding_window": 8, "head_dim": 24,
                                "layer_types": ["full_attention", *["sliding_attention"] * 3]}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": {
        "type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.25}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 8, "num_hidden_layers": 6, "logit_scale": 0.3}),
    "exaone4": ("exaone4", {"sliding_window": 8, "num_hidden_layers": 6}),
    "seed-oss": ("seed_oss", {"head_dim": 24, "attention_out_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "ernie45": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "nemotron": ("nemotron", {"attention_bias": True}),
    "arcee": ("arcee", {}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 24}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "helium": ("helium", {"head_dim": 16}),
    "cwm": ("cwm", {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6}),
    "vaultgemma": ("vaultgemma", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8}),
    "deepseek-v2": ("deepseek_v2", LATENT | {
        "q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
        "topk_group": 2, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.0}),
    "deepseek-v3": ("deepseek_v3", LATENT | {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "glm4-moe-lite": ("glm4_moe_lite", LATENT | {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}),
    "youtu": ("youtu", LATENT | {"rope_interleave": False}),
    "gpt-oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2,
                                  "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.3}),
    "granitemoeshared": ("granitemoeshared", {"num_local_experts": 4, "num_experts_per_tok": 2,
                                              "attention_multiplier": 0.2, "shared_intermediate_size": 96}),
    "granite-hybrid": ("granitemoehybrid", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2, "embedding_multiplier": 3.0,
        "logits_scaling": 4.0, "residual_multiplier": 0.3, "shared_intermediate_size": 40, "mamba_n_heads": 8,
        "mamba_d_state": 12, "mamba_d_conv": 3, "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba"],
        "num_hidden_layers": 5}),
    "bamba": ("bamba", {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10, "attn_layer_indices": [1, 3]}),
    "granite-hybrid-groups": ("granitemoehybrid", {
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 56, "mamba_n_heads": 4,
        "mamba_n_groups": 2, "mamba_d_state": 6, "position_embedding_type": "rope", "num_hidden_layers": 5,
        "layer_types": ["mamba", "attention", "mamba", "attention", "mamba"]}),
    "granite-hybrid-dense": ("granitemoehybrid", {
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 72, "mamba_n_heads": 8,
        "position_embedding_type": "rope", "attention_multiplier": 0.2, "num_hidden_layers": 5,
        "layer_types": ["attention"] * 5}),
    "granitemoe-swa": ("granitemoe_swa", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2, "sliding_window": 8,
        "shared_intermediate_size": 0, "layer_rope_theta": [0, 5e4, 1e4, 1e4]}),
    "ernie45-moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}),
    "qwen35": ("qwen3_5_text", DELTA | {"head_dim": 16}),
    "qwen35-moe": ("qwen3_5_moe_text", DELTA | {
        "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40}),
    "qwen3-next": ("qwen3_next", DELTA | {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40}),
    "lfm2": ("lfm2", {"full_attn_idxs": [2], "block_multiple_of": 16}),
    "lfm2-moe": ("lfm2_moe", {
        "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"], "num_hidden_layers": 5,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "gemma4": ("gemma4_text", {
        "head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 4, "num_global_key_value_heads": 2,
        "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 8, "num_hidden_layers": 7,
        "final_logit_softcapping": 30.0}),
    "gemma4-apart": ("gemma4_text", {
        "head_dim": 8, "global_head_dim": 12, "hidden_size_per_layer_input": 0, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4}),
    "gemma4-moe": ("gemma4_text", {
        "head_dim": 8, "global_head_dim": 12, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "sliding_window": 8, "num_hidden_layers": 7, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}),
    "gemma4-e2b": ("gemma4_text", SMALL | {
        "vocab_size": 97, "head_dim": 8, "global_head_dim": 12, "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97, "sliding_window": 8,
        "num_hidden_layers": 9,
        "num_kv_shared_layers": 5, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3}),
    "gemma4-e4b": ("gemma4_text", SMALL | OTHER | {
        "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97,
        "sliding_window": 12, "num_hidden_layers": 8, "num_kv_shared_layers": 3, "attention_k_eq_v": True,
        "num_global_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"] * 4}),
    "gemma3n": ("gemma3n_text", SMALL | {
        "vocab_size": 97, "head_dim": 8, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 80,
        "pad_token_id": 2, "sliding_window": 8, "num_hidden_layers": 9, "num_kv_shared_layers": 4, "laurel_rank": 12,
        "activation_sparsity_pattern": [0.9, 0.9, 0.4, *[0.0] * 6],
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3}),
    "gemma3n-other": ("gemma3n_text", SMALL | OTHER | {
        "head_dim": 16, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97, "sliding_window": 12,
        "num_kv_shared_layers": 0, "laurel_rank": 5, "altup_num_inputs": 3, "altup_active_idx": 1,
        "altup_coef_clip": 50.0, "intermediate_size": [40, 40, 56, 40, 40],
        "activation_sparsity_pattern": [0.0, 0.7, 0.7, 0.0, 0.5], "final_logit_softcapping": 10.0}),
    "llama4": ("llama4_text", {
        "head_dim": 16, "intermediate_size": 24, "intermediate_size_mlp": 56, "num_local_experts": 4,
        "attention_chunk_size": 8, "interleave_moe_layer_step": 2, "floor_scale": 6, "attn_scale": 0.4,
        "rope_scaling": LLAMA3, "rope_theta": 5e5}),
    "llama4-plain": ("llama4_text", {
        "head_dim": 24, "intermediate_size": 24, "num_local_experts": 3, "attention_chunk_size": 12,
        "num_experts_per_tok": 2, "attn_temperature_tuning": False, "use_qk_norm": False}),
    "hy-v3": ("hy_v3", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}),
    "jais2": ("jais2", {}),
    "granite-swa": ("granite_swa", {"sliding_window": 8, "attention_multiplier": 0.2,
                                    "layer_rope_theta": [1e4, 0, 1e4, 0]}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "phi": ("phi", {}),
    "gptj": ("gptj", GPT | {"rotary_dim": 8}),
    "gptj-other": ("gptj", GPT | OTHER_GPT | {"rotary_dim": 4}),
    "codegen": ("codegen", GPT | {"rotary_dim": 8}),
    "codegen-other": ("codegen", GPT | OTHER_GPT | {"n_head": 4, "rotary_dim": 4}),
    "opt": ("opt", {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 96,
                    "max_position_embeddings": 64, "vocab_size": 96}),
    "opt-other": ("opt", {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "ffn_dim": 40,
                          "max_position_embeddings": 50, "vocab_size": 97, "tie_word_embeddings": False}),
    "gpt-bigcode": ("gpt_bigcode", GPT),
    "gpt-bigcode-other": ("gpt_bigcode", GPT | OTHER_GPT | {"multi_query": False}),
}  # fmt: skip


def sized() -> dict[str, tuple[str, dict[str, object]]]:
    """The kind and fields of each model: NAME, and NAME-other with other sizes."""
    found, layers = dict[str, tuple[str, dict[str, object]]](), OTHER["num_hidden_layers"]
    for name, (kind, fields) in FAMILIES.items():
        if "vocab_size" in fields:
            found[name] = kind, fields
            continue
        fits = [name for name, value in fields.items() if isinstance(value, list) and len(value) == layers]
        other = {name: value for name, value in fields.items() if name not in OF_LAYERS or name in fits}
        other |= {"head_dim": 8} if kind == "helium" else {}  # its heads together are as wide as the model
        other |= OTHER if "kv_lora_rank" not in fields else OTHER | {"num_key_value_heads": 6}
        found |= {name: (kind, SMALL | fields), f"{name}-other": (kind, SMALL | other)}
    return found
