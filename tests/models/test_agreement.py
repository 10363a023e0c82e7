"""Imported parameters against the recipe's model: every setting in config.json that shapes do not show is compared."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.core.errors import DataError, FieldError
from dtrain.models.agreement import RECORD, agree, record
from dtrain.models.decoder import Decoder
from dtrain.models.decoder_layer import QueryGrowth
from dtrain.models.families.config import config_of
from dtrain.models.layer_pattern import LayerKind
from dtrain.models.mlp import MLP
from dtrain.models.moe import Experts
from dtrain.models.rope import Learned, LinearScaling, Llama3, Rope, Yarn
from dtrain.models.settings import COMPUTING, LATER, TRAINING, settings
from tests.conftest import SHARED
from tests.models.test_decoder import PUBLISHED

SIZES = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 2, "max_position_embeddings": 64}  # fmt: skip
DENSE = SIZES | {"intermediate_size": 12, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4}
TINY = Decoder(vocab=32, context=16, layers=4, width=8, heads=4, kv_heads=2, head_dim=2, hidden=12, epsilon=1e-6)
GEMMA = dataclasses.replace(TINY, feed_forward="geglu", norm_offset=True, embed_scale=True, tied=True)
FAMILIES: dict[str, tuple[Decoder, dict[str, Any]]] = {
    "llama": (TINY, DENSE),
    "mistral": (dataclasses.replace(TINY, window=8), DENSE | {"sliding_window": 8}),
    "mixtral": (
        dataclasses.replace(TINY, hidden=None, experts=Experts(count=4, active=2, hidden=12)),
        DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2": (dataclasses.replace(TINY, qkv_bias=True), DENSE | {"sliding_window": 8, "use_sliding_window": False}),
    "qwen3": (
        dataclasses.replace(TINY, qk_norm=True, window=8, global_every=4),
        DENSE | {"use_sliding_window": True, "sliding_window": 8,
                 "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    ),
    "qwen3_moe": (
        dataclasses.replace(TINY, qk_norm=True, hidden=None, experts=Experts(count=4, active=2, hidden=6)),
        DENSE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True},
    ),
    "gemma": (GEMMA, DENSE | {"hidden_act": "gelu"}),
    "gemma2": (
        dataclasses.replace(
            GEMMA, post_norm=True, window=8, global_every=2, query_pre_attn_scalar=3, attention_softcap=50.0,
            logit_softcap=30.0,
        ),
        DENSE | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 3, "sliding_window": 8},
    ),
    "gpt2": (
        Decoder(vocab=32, context=16, layers=4, width=8, heads=4, feed_forward="gelu_tanh", position=Learned(),
                norm="layer", norm_bias=True, bias=True, tied=True),
        {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 4, "n_head": 4, "n_inner": None},
    ),
}  # fmt: skip
OTHER: dict[str, Any] = {
    "vocab": 64, "layers": 8, "width": 16, "heads": 8, "kv_heads": 4, "head_dim": 4, "hidden": 24,
    "feed_forward": "gelu", "experts": Experts(count=4, active=1, hidden=6, scale=2.0, renormalise=False),
    "position": Rope(theta=777.0), "norm": "layer", "epsilon": 1e-3, "attention_softcap": 7.0, "logit_softcap": 7.0,
    "query_pre_attn_scalar": 7.0, "window": 4, "global_every": 0, "pattern": (LayerKind(window=4), LayerKind()),
    "qkv_clip": 3.0, "embed_multiplier": 2.0, "residual_multiplier": 0.5, "logit_multiplier": 2.0,
    "attention_multiplier": 0.7, "query_growth": QueryGrowth(rate=0.1, original=4),
}  # fmt: skip
"""A different value of each field that is not a bool."""


def against(tmp_path: Path, model: Decoder, kind: str, config: dict[str, Any], **how: Any) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | config))
    notes: list[str] = []
    agree(model, {}, tmp_path, notes.append, published=True, **how)
    return notes


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_setting_that_differs_from_config_json_is_refused(tmp_path: Path, kind: str) -> None:
    model, config = FAMILIES[kind]
    assert against(tmp_path, model, kind, config) == []
    for field in dataclasses.fields(Decoder):
        if field.name in TRAINING | COMPUTING | {"kind"}:
            continue
        current = getattr(model, field.name)
        try:
            wrong = dataclasses.replace(model, **{field.name: OTHER.get(field.name, not current)})
        except FieldError:
            continue
        if settings(wrong) == settings(model):  # such as qkv_bias when every product has a bias
            continue
        with pytest.raises(DataError, match=f"model\\.{field.name}") as caught:
            against(tmp_path, wrong, kind, config)
        assert caught.value.exit_code == 4
        assert "--allow-changes" in caught.value.hint
        assert against(tmp_path, wrong, kind, config, allowed=True)[0].startswith("imported despite the differences: ")


@pytest.mark.parametrize(
    ("changed", "theirs", "ours"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps: 1e-05 ", "model.epsilon: 1e-06"),
        ({"rope_theta": 5e5}, "rope_theta: 500000.0 ", "model.position.theta: 10000.0"),
        ({"rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}, "rope_theta": 777.0},
         "rope_parameters.rope_theta: 777.0 ", "model.position.theta: 10000.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: {'type': 'linear'", "position.scaling"),
        ({"num_attention_heads": 16}, "num_attention_heads: 16 ", "model.heads: 4"),
        ({"num_key_value_heads": None}, "num_key_value_heads: None ", "model.kv_heads: 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: True ", "model.tied: false"),
        ({"hidden_act": "gelu_new"}, "hidden_act: gelu_new ", 'model.feed_forward: "swiglu"'),
        ({"hidden_act": "relu"}, "hidden_act: relu ", "not supported by dtrain"),
        ({"attention_bias": True}, "attention_bias: True ", "model.out_bias: false"),
        ({"attention_bias": True, "mlp_bias": True}, "attention_bias: True ", "model.bias: false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 ", "not supported by dtrain"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type: dyna", "not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "alpha": 0.7}}, "rope_scaling.alpha: 0.7", "not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: {'bits': 4}", "not supported by dtrain"),
    ],
)  # fmt: skip
def test_a_difference_is_shown_under_both_names_side_by_side(
    tmp_path: Path, changed: dict[str, Any], theirs: str, ours: str
) -> None:
    with pytest.raises(DataError) as caught:
        against(tmp_path, TINY, "llama", DENSE | changed)
    assert any(theirs in line and ours in line for line in caught.value.message.splitlines()), caught.value.message


def test_all_differences_are_shown_at_once_with_the_overrides_that_resolve_them(tmp_path: Path) -> None:
    wrong = dataclasses.replace(TINY, epsilon=1e-3, position=Rope(theta=777.0), heads=2, kv_heads=1, head_dim=4)
    with pytest.raises(DataError) as caught:
        against(tmp_path, wrong, "llama", DENSE)
    assert len(caught.value.message.splitlines()) == 2 + 5
    assert "model.epsilon=1e-06" in caught.value.hint
    assert "model.position.theta=10000.0" in caught.value.hint


@pytest.mark.parametrize(
    ("spelling", "scaling"),
    [
        ({"type": "linear", "factor": 2.0}, LinearScaling(factor=2.0)),
        (
            {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192},
            Llama3(factor=32.0),
        ),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, Yarn(factor=4.0, original=32)),
        ({"rope_type": "default"}, None),
    ],
)  # fmt: skip
def test_both_spellings_of_rope_scaling_are_read(tmp_path: Path, spelling: dict[str, Any], scaling: Any) -> None:
    model = dataclasses.replace(TINY, position=Rope(theta=1e4, scaling=scaling))
    assert against(tmp_path, model, "llama", DENSE | {"rope_scaling": spelling}) == []
    newer = {name: value for name, value in DENSE.items() if name != "rope_theta"}
    assert against(tmp_path, model, "llama", newer | {"rope_parameters": spelling | {"rope_theta": 1e4}}) == []


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_exported_config_json_describes_the_same_model(tmp_path: Path, kind: str) -> None:
    model, _ = FAMILIES[kind]
    config = config_of(model)
    assert config is not None
    assert config["model_type"] == kind
    assert against(tmp_path, model, kind, config) == []
    assert config_of(dataclasses.replace(model, norm_bias=not model.norm_bias)) is None


def test_what_cannot_be_checked_is_named(tmp_path: Path) -> None:
    notes = against(tmp_path, TINY, "llama", DENSE | {"novel_gate": 3, "initializer_range": 0.1})
    assert notes == [f"{tmp_path}/config.json has fields that dtrain does not recognise and did not check: novel_gate"]
    long = against(tmp_path, dataclasses.replace(TINY, context=128), "llama", DENSE)
    assert long == [f"model.context = 128 is more than the 64 positions of {tmp_path}/config.json"]
    (tmp_path / "config.json").unlink()
    notes = []
    agree(TINY, {}, tmp_path / "model.safetensors", notes.append, published=True)
    assert notes[0].startswith(f"no {tmp_path}/config.json: the number of heads, epsilon, rope theta and scaling")
    agree(MLP(sizes=(4, 3)), {}, tmp_path, notes.append, published=False)
    assert "only names and shapes were checked" in notes[1]


def test_a_window_wider_than_the_context_is_none(tmp_path: Path) -> None:
    model, config = FAMILIES["mistral"]
    assert (
        against(tmp_path, dataclasses.replace(model, window=None), "mistral", config | {"sliding_window": 4096}) == []
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "opt", "architectures": ["OPTForCausalLM"]}, "does not support model_type opt .OPTForCausal"),
        ({"model_type": "llama"}, "has no hidden_size"),
        (DENSE | {"model_type": "llama", "num_attention_heads": 3}, "does not describe a decoder: .*kv_heads = 2"),
        ("[", "cannot be read as JSON"),
    ],
)
def test_a_config_json_that_cannot_be_used_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(DataError, match=message):
        agree(TINY, {}, tmp_path, print, published=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_config_files_agree_with_the_models_whose_logits_are_tested(name: str) -> None:
    folder = SHARED / "data" / "hf_tiny" / name
    if not folder.is_dir():
        pytest.skip("the small published checkpoints are not beside this checkout")
    notes: list[str] = []
    agree(PUBLISHED[name], {}, folder, notes.append, published=True)
    assert notes == []
    real, exported = json.loads((folder / "config.json").read_text()), config_of(PUBLISHED[name])
    assert exported is not None
    rope = real.pop("rope_parameters", {})
    real |= {"rope_theta": rope["rope_theta"], "rope_scaling": None} if rope else {}
    exported.pop("max_position_embeddings", None)  # the recipe's rows may be shorter
    assert {name: real.get(name) for name in exported} == exported


def test_a_file_of_dtrain_is_compared_by_the_settings_in_its_header(tmp_path: Path) -> None:
    notes: list[str] = []
    for model, other in (
        (TINY, dataclasses.replace(TINY, epsilon=1e-3)),
        (TINY, dataclasses.replace(TINY, position=Rope(theta=777.0))),
        (MLP(sizes=(4, 3)), MLP(sizes=(4, 3), activation="tanh")),
    ):
        agree(model, record(model), tmp_path, notes.append, published=False)
        with pytest.raises(DataError, match="comes from a different model than the recipe's"):
            agree(other, record(model), tmp_path, notes.append, published=False)
    agree(dataclasses.replace(TINY, remat="full", z_loss=0.1), record(TINY), tmp_path, notes.append, published=False)
    assert notes == []


@pytest.mark.parametrize("change", [{}, {"bias": True}, {"position": Rope(scaling=Yarn(factor=2.0, original=8))}])
def test_a_file_of_an_earlier_version_has_what_that_version_computed(tmp_path: Path, change: dict[str, Any]) -> None:
    model, notes = dataclasses.replace(TINY, **change), list[str]()
    header = json.loads(record(model)[RECORD])
    earlier = {name: value for name, value in header.items() if name not in {*LATER, "out_bias", "mlp_bias"}}
    if scaling := earlier["position.scaling"]:
        del scaling["attention_factor"]
    agree(model, {RECORD: json.dumps(earlier)}, tmp_path, notes.append, published=False)
    assert notes == []
    for other in (
        {"parallel": True},
        {"position": Rope(interleaved=True)},
        {"pattern": (LayerKind(window=4), LayerKind())},
    ):
        with pytest.raises(DataError, match="comes from a different model"):
            agree(dataclasses.replace(model, **other), {RECORD: json.dumps(earlier)}, tmp_path, notes.append,
                  published=False)  # fmt: skip
