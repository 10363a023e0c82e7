"""Fields of config.json that decide more than one setting, or that a class of transformers does not take."""

from pathlib import Path
from typing import Any

import pytest

from dtrain.models.decoder import Decoder
from dtrain.models.families.config import config_of, published_model
from dtrain.models.latent import Latent
from dtrain.models.moe import Experts
from dtrain.models.rope import Rope, Yarn
from dtrain.models.settings import LATER, completed, differing, later, settings

LATENT_FIELDS = {"kv_lora_rank": 12, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
                 "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 24}  # fmt: skip
V3 = LATENT_FIELDS | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
         "max_position_embeddings": 64}  # fmt: skip


def read(kind: str, **fields: object) -> tuple[Any, tuple[str, ...]]:
    """The model of a config.json, and what of it is not served."""
    found = published_model({"model_type": kind} | SIZES | fields, 64, Path("config.json"))
    return found.model, found.unserved


def test_deepseek_v2_has_groups_only_where_its_method_says_so() -> None:
    greedy, _ = read("deepseek_v2", **LATENT_FIELDS)
    assert greedy.experts.groups == 1
    grouped, unserved = read(
        "deepseek_v2", **LATENT_FIELDS, topk_method="group_limited_greedy", n_group=4, topk_group=2
    )
    assert (grouped.experts.groups, grouped.experts.active_groups, grouped.experts.group_by) == (4, 2, 1)
    assert not unserved
    assert read("deepseek_v2", **LATENT_FIELDS, rope_interleave=False)[0].position.interleaved
    assert not read("deepseek_v3", **V3, rope_interleave=False)[0].position.interleaved


def test_the_scale_of_scores_is_read_and_written_for_every_reader() -> None:
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
    model, unserved = read("deepseek_v3", **V3, rope_scaling=scaling | {"mscale": 0.707, "mscale_all_dim": 0.707})
    assert not unserved
    assert model.position.scaling.mscale_all_dim == 0.707
    assert model.position.scaling.scores == pytest.approx(1.5896, abs=1e-4)  # (0.1 x 0.707 x log(40) + 1) squared
    assert model.position.scaling.attention == 1
    written: Any = config_of(model)
    assert {name: written["rope_scaling"][name] for name in ("mscale", "mscale_all_dim", "attention_factor")} == {
        "mscale": 0.707, "mscale_all_dim": 0.707, "attention_factor": 1.0,
    }  # fmt: skip
    other, _ = read("deepseek_v3", **V3, rope_scaling=scaling | {"mscale": 1.0, "mscale_all_dim": 0.5})
    again: Any = config_of(other)
    assert again["rope_scaling"]["mscale"] == pytest.approx(1.0)


def test_second_names_of_fields_count_and_must_not_contradict() -> None:
    model, unserved = read("ernie4_5_moe", num_experts=8, num_experts_per_tok=3)
    assert (model.experts.count, model.experts.active) == (8, 3)
    assert not unserved
    assert read("ernie4_5_moe", num_experts_per_tok=3, moe_k=2)[1] == ("num_experts_per_tok: 3 but moe_k: 2",)


def test_fields_that_the_class_does_not_take_are_refused() -> None:
    assert read("glm4_moe_lite", **LATENT_FIELDS, first_k_dense_replace=2)[1] == ("first_k_dense_replace: 2",)
    assert read("glm4_moe_lite", **LATENT_FIELDS, first_k_dense_replace=1)[1] == ()
    assert read("gpt_neox", partial_rotary_factor=0.5)[1] == ("partial_rotary_factor: 0.5",)
    gptj = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    found = published_model({"model_type": "gptj", "rotary_dim": None} | gptj, 64, Path("config.json"))
    assert found.unserved == ("rotary_dim: None",)


def test_kimi_k2_is_read_as_the_family_whose_code_it_has() -> None:
    model, unserved = read("kimi_k2", **V3)
    assert not unserved
    assert model.latent == Latent(rank=12, rotated=4, value_dim=6)


@pytest.mark.parametrize("kind", ["gpt_neox", "granitemoe"])
def test_heads_of_another_width_are_not_exported_as_classes_that_have_none(kind: str) -> None:
    models = {
        "gpt_neox": {"norm": "layer", "norm_bias": True, "bias": True, "feed_forward": "gelu", "parallel": True,
                     "parallel_norms": True},
        "granitemoe": {"embed_multiplier": 2.0, "experts": Experts(count=4, active=2, hidden=24)},
    }  # fmt: skip
    values: Any = {"vocab": 96, "context": 64, "layers": 2, "width": 32, "heads": 4, **models[kind]}
    assert (config_of(Decoder(**values)) or {})["model_type"] == kind
    assert (config_of(Decoder(**values, head_dim=16)) or {}).get("model_type") != kind


def test_files_and_runs_of_earlier_versions_compute_the_same() -> None:
    """Their records have none of the later settings, and no other is missing or different."""
    values: Any = {"vocab": 96, "context": 64, "layers": 2, "width": 32, "heads": 4}
    scaling = Yarn(factor=2.0, original=16)
    model = Decoder(**values, position=Rope(scaling=scaling), experts=Experts(count=4, active=2, hidden=16, shared=2))
    now = settings(model)
    old = {name: value for name, value in now.items() if name not in LATER}
    old["position.scaling"] = {"kind": "yarn", "factor": 2.0, "original": 16, "fast": 32.0, "slow": 1.0}
    assert differing(completed(old), now, 64) == []
    added = later({"kind": "decoder", "position.theta": 1e4, "position.scaling.kind": "yarn"})
    assert added["position.scaling.truncate"] is True
    assert "position.scaling.truncate" not in later({"kind": "decoder", "position.theta": 1e4})
