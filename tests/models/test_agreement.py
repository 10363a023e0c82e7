"""Imported parameters against the recipe's model: every setting in config.json that shapes do not show is compared."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dtrain.core.errors import DataError, FieldError
from dtrain.core.types import JsonObject
from dtrain.models.agreement import RECORD, agree, record
from dtrain.models.altup import AltUp
from dtrain.models.decoder import Decoder
from dtrain.models.decoder_layer import QueryGrowth
from dtrain.models.delta import Delta
from dtrain.models.families.config import FAMILIES as PUBLISHED_FAMILIES
from dtrain.models.families.config import config_of, published_model
from dtrain.models.families.fields import Published
from dtrain.models.latent import Latent
from dtrain.models.layer_pattern import LayerKind, shared_from
from dtrain.models.mlp import MLP
from dtrain.models.moe import Experts
from dtrain.models.rope import Learned, LinearScaling, Llama3, NoPosition, Rope, Yarn
from dtrain.models.settings import COMPUTING, LATER, TRAINING, differing, later, settings
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
    "attention_multiplier": 0.7, "query_growth": QueryGrowth(rate=0.1, original=4), "latent": Latent(rank=4, rotated=2),
    "altup": AltUp(),
}  # fmt: skip
"""A different value of each field that is not a bool."""


def test_every_family_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text()
    assert [kind for kind in PUBLISHED_FAMILIES if f"`{kind}`" not in page] == []


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
        (
            {"model_type": "xglm", "architectures": ["XGLMForCausalLM"]},
            "does not support model_type xglm .XGLMForCausal",
        ),
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


SIZES_OF_ALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "head_dim": 8,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def read_of(kind: str, **fields: Any) -> Published:
    return published_model({"model_type": kind} | SIZES_OF_ALL | fields, 64, Path("config.json"))


def exported_as(**fields: Any) -> str | None:
    config = config_of(Decoder(**{"vocab": 64, "context": 64, "layers": 4, "width": 32, "heads": 4} | fields))
    return config and str(config["model_type"])


def test_layers_without_experts_are_compared_in_their_order() -> None:
    sigmoid = Experts(count=4, active=2, hidden=16, shared=1, score="sigmoid", bias=True)
    first, mixed = (LayerKind(dense=True), LayerKind(count=3)), (LayerKind(dense=True), LayerKind())
    assert exported_as(hidden=40, experts=sigmoid, pattern=first) == "glm4_moe"
    assert exported_as(hidden=40, experts=sigmoid, pattern=mixed) is None
    one, other = (
        settings(dataclasses.replace(TINY, experts=sigmoid, hidden=40, pattern=pattern))
        for pattern in (first, (*first[1:], first[0]))
    )
    assert differing(one, other, 64) == ["pattern"]


def test_layers_without_attention_are_compared_in_their_order() -> None:
    delta, full = LayerKind(mixer="delta"), LayerKind()
    sizes = Delta(key_heads=2, value_heads=2, key_dim=4, value_dim=4)
    one, other = (
        settings(dataclasses.replace(TINY, delta=sizes, pattern=pattern)) for pattern in ((delta, full), (full, delta))
    )
    assert differing(one, other, 64) == ["pattern"]
    assert later({})["delta"] is later({})["convolution"] is None


def test_the_fields_of_qwen_3_5_are_read() -> None:
    usual = read_of("qwen3_5_text", num_hidden_layers=4, attn_output_gate=True, mamba_ssm_dtype="float32")
    assert [kind.mixer for kind in usual.model.kinds] == ["delta"] * 3 + ["attention"]
    assert (usual.unserved, usual.unchecked) == ((), ())
    every = read_of("qwen3_5_text", num_hidden_layers=4, full_attention_interval=2, attn_output_gate=False)
    assert [kind.mixer for kind in every.model.kinds] == ["delta", "attention"] * 2
    assert every.unserved == ("attn_output_gate: False",)
    alone = read_of("qwen3_5_text", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    assert (alone.model.delta, alone.model.pattern) == (None, ())
    for wrong in ({"full_attention_interval": 0}, {"linear_conv_kernel_dim": 0}, {"linear_num_key_heads": 2.5}):
        with pytest.raises(DataError, match="it must be a whole number of at least 1"):
            read_of("qwen3_5_text", **wrong)
    for types in ("full_attention", [1, 2]):
        with pytest.raises(DataError, match="layer_types"):
            read_of("qwen3_5_text", num_hidden_layers=2, layer_types=types)


def test_the_fields_of_qwen_3_next_are_read() -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 20}
    usual = read_of(
        "qwen3_next",
        num_hidden_layers=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
        rope_scaling=None,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        **sizes,
    )
    assert (usual.unserved, usual.unchecked) == ((), ())
    assert [kind.mixer for kind in usual.model.kinds] == (["delta"] * 3 + ["attention"]) * 2
    assert usual.model.experts.renormalise
    dense = read_of("qwen3_next", decoder_sparse_step=2, mlp_only_layers=[0], **sizes)
    assert set(dense.unserved) == {"decoder_sparse_step: 2", "mlp_only_layers: [0]"}


@pytest.mark.parametrize(("kind", "written"), [("", "llama"), ("mistral", "mistral"), ("qwen2", "llama")])
def test_a_model_is_written_as_the_type_that_it_came_as(kind: str, written: str) -> None:
    """Unless that type computes something else: Qwen 2 has biases."""
    config = config_of(read_of("mistral", sliding_window=None).model, kind)
    assert config is not None
    assert config["model_type"] == written


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "gemma4"])
def test_a_decoder_from_beside_an_image_encoder_is_written_alone(kind: str) -> None:
    model = read_of(f"{kind}_text", hidden_size_per_layer_input=0).model
    config = config_of(model, kind)
    assert config is not None
    assert config["model_type"] == f"{kind}_text"


def test_the_fields_of_lfm2_are_read() -> None:
    """Its files have some fields twice, and the width of the feed-forward layer before it is adjusted."""
    twice = {"block_ff_dim": 96, "intermediate_size": 96, "tie_embedding": True, "full_attn_idxs": [1], "conv_dim": 32}
    types = ["conv", "full_attention"]
    found = read_of("lfm2", num_hidden_layers=2, layer_types=types, block_multiple_of=16, norm_eps=1e-5, **twice)
    assert [kind.mixer for kind in found.model.kinds] == ["convolution", "attention"]
    assert (found.model.hidden, found.model.tied, found.unserved, found.unchecked) == (64, True, (), ())
    assert read_of("lfm2", conv_bias=True).unserved == ("conv_bias: True",)
    with pytest.raises(DataError, match="no layer_types"):
        read_of("lfm2_moe")
    sparse = read_of("lfm2_moe", num_hidden_layers=2, layer_types=types, num_dense_layers=0).model
    assert (sparse.stacks, settings(sparse)["hidden"]) == (("convolution_sparse", "sparse"), None)
    assert config_of(sparse)["intermediate_size"] == sparse.experts.hidden  # pyright: ignore[reportOptionalSubscript]


def test_the_fields_of_gemma_4_are_read() -> None:
    """Those of the model of 31 billion parameters; `per_layer_config` is how transformers saves two of them."""
    large: Any = {
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "attention_k_eq_v": True,
        "num_global_key_value_heads": 4, "hidden_size_per_layer_input": 0, "sliding_window": 1024,
        "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision", "head_dim": 256,
    }  # fmt: skip
    found = read_of("gemma4_text", **large)
    local, full = found.model.kinds[4:6]
    assert (found.unserved, found.unchecked, len(found.model.kinds)) == ((), (), 60)
    assert (local.window, local.kv_heads, local.head_dim, local.shared_values) == (1024, None, None, False)
    assert (full.window, full.kv_heads, full.head_dim, full.shared_values) == (None, 4, 512, True)
    assert found.model.rotations == ((Rope(theta=1e4), 256), (Rope(theta=1e6, partial=0.25, proportional=True), 512))
    own = {str(number): {"head_dim": 512, "num_key_value_heads": 4} for number in range(5, 60, 6)}
    assert (
        read_of("gemma4_text", **large | {"num_global_key_value_heads": 9}, per_layer_config=own).model == found.model
    )
    apart = read_of("gemma4_text", **large | {"attention_k_eq_v": False}).model.kinds[5]
    assert (apart.kv_heads, apart.head_dim, apart.shared_values) == (None, 512, False)
    small: Any = {
        "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 1536,
        "intermediate_size": 6144, "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "vocab_size": 262_144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "head_dim": 256,
    }  # fmt: skip
    found = read_of("gemma4_text", **small)  # E2B
    assert (found.unserved, found.unchecked, found.model.layer_inputs) == ((), (), 256)
    kinds = found.model.kinds
    assert [kind.shared_keys for kind in kinds] == [False] * 15 + [True] * 20
    assert {kind.hidden for kind in kinds[:15]} == {None}
    assert {kind.hidden for kind in kinds[15:]} == {12_288}
    assert set(shared_from(kinds)) == {None, 13, 14}  # the last layers of either kind that have keys of their own
    unified = read_of("gemma4_unified_text", hidden_size=32, num_hidden_layers=6, num_attention_heads=4)
    assert (unified.model.kinds[0].window, unified.unserved) == (1024, ())


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hidden_size_per_layer_input": None}, "vocab_size_per_layer_input: 262144, which is not vocab_size"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers: 2, and no earlier layer of each type"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers: 6, and no earlier layer of each type"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: all"),
        ({"layer_types": ["conv"] * 6}, "layer_types: conv, 6 of 6 layers"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
         "rope_parameters: {'rope_type': 'default', 'rope_theta': 1000000.0}, without those of "),
        ({"per_layer_config": {"9": {}}}, "per_layer_config: {'9': {}}, not a mapping by the numbers of 6 layers"),
        ({"enable_moe_block": True, "num_experts": 4}, "enable_moe_block: True, without top_k_experts, moe_inter"),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config: hidden_size: 8"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
         "rope_parameters.full_attention: {'rope_type': 'yarn', 'factor': 2.0}"),
    ],
)  # fmt: skip
def test_what_gemma_4_has_beside_is_refused(fields: dict[str, Any], problem: str) -> None:
    given = {"num_hidden_layers": 6, "hidden_size_per_layer_input": 0} | fields
    given = {name: value for name, value in given.items() if value is not None}
    assert any(one.startswith(problem) for one in read_of("gemma4_text", **given).unserved)


def test_the_fields_of_llama_4_are_read() -> None:
    """Those of Scout, and of Maverick, in whose every other layer there are experts."""
    scout: Any = {"num_hidden_layers": 48, "num_attention_heads": 40, "hidden_size": 5120}
    found = read_of("llama4_text", **scout)
    assert (found.unserved, found.unchecked) == ((), ())
    assert [kind.chunk for kind in found.model.kinds[:4]] == [8192] * 3 + [None]
    assert isinstance(found.model.kinds[3].position, NoPosition)
    assert not any(kind.dense for kind in found.model.kinds)
    assert found.model.query_growth == QueryGrowth(rate=0.1, original=8192, first=1, unrotated=True)
    large = read_of("llama4_text", **scout, interleave_moe_layer_step=2, use_qk_norm=False).model
    assert [kind.dense for kind in large.kinds[:4]] == [True, False] * 2
    assert (large.hidden, large.qk_norm_plain) == (16_384, False)
    assert read_of("llama4_text", **scout, attn_temperature_tuning=4).model == found.model  # as older files have it
    for wrong, problem in (
        ({"attention_chunk_size": None}, "layer_types: chunked_attention, without attention_chunk_size"),
        ({"layer_types": ["conv"] * 48}, "layer_types: conv, 48 of 48 layers"),
        ({"no_rope_layers": [1, 0]}, "layer_types: chunked_attention, full_attention, 2 of 48 layers"),
    ):
        assert any(one.startswith(problem) for one in read_of("llama4_text", **scout, **wrong).unserved), problem


def test_a_decoder_with_an_image_encoder_may_have_fields_outside_its_own() -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
    inner = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    assert published_model(inner, 64, Path("config.json")).model.tied
    packed = inner | {"quantization_config": {"quant_method": "gptq"}}
    assert any("quantization_config" in one for one in published_model(packed, 64, Path("config.json")).unserved)


def test_windows_are_those_that_transformers_computes() -> None:
    star = {"norm": "layer", "norm_bias": True, "bias": True, "feed_forward": "gelu_tanh", "window": 8}
    assert (exported_as(**star), exported_as(**star, global_every=2)) == ("starcoder2", None)
    unserved = read_of("qwen3_moe", use_sliding_window=True, sliding_window=8, max_window_layers=2).unserved
    assert unserved == ("use_sliding_window: True, sliding_window: 8",)
    for kind in ("cohere2", "exaone4"):  # the window decides which layers rotate, also where no row reaches it
        assert config_of(read_of(kind, sliding_window=4096).model)["model_type"] == kind  # pyright: ignore[reportOptionalSubscript]


def test_what_published_files_of_a_family_say_is_read() -> None:
    mini = {"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 4}
    found = read_of("minimax_m2", **mini)
    assert (found.model.position.partial, found.unserved, found.unchecked) == (0.5, (), ())
    assert read_of("minimax_m2", **mini | {"scoring_func": "softmax"}).unserved == ("scoring_func: softmax",)
    hunyuan = read_of("hunyuan_v1_dense", use_qk_norm=True, rope_scaling={"type": "dynamic", "alpha": 1000.0})
    assert hunyuan.model.position.theta == pytest.approx(1e4 * 1000 ** (8 / 6))
    assert not hunyuan.unserved
    assert read_of("hunyuan_v1_moe", num_experts=4, moe_topk=[2] * 4).model.experts.active == 2
    kinds = read_of("exaone_moe", mlp_layer_types=["dense", "sparse", "dense", "sparse"], num_nextn_predict_layers=1)
    assert [kind.dense for kind in kinds.model.kinds] == [True, False, True, False]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    both = read_of("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_scaling=yarn)
    assert both.unserved[0].startswith("rope_scaling: ")
    pictures = {"model_type": "gemma3", "text_config": {"hidden_size": 32, "intermediate_size": 40, "head_dim": 8}}
    assert published_model(pictures, 64, Path("config.json")).model.vocab == 262_208
    longer = read_of("smollm3", no_rope_layers=[1, 0, 1, 0, 1, 1])
    assert [kind.position is None for kind in longer.model.kinds] == [True, False, True, False]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("mistral", {"num_hidden_layers": 0}, "num_hidden_layers: 0; it must be a number of layers"),
        ("llama", {"rope_scaling": "linear"}, "does not describe a decoder"),
        ("unheard", {"architectures": 5}, "does not support model_type unheard (no architecture named)"),
        ("deepseek_v32", {}, "it needs latent attention with a sparse index"),
    ],
)
def test_a_config_json_of_something_else_is_refused(kind: str, fields: JsonObject, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read_of(kind, **fields)


DEFAULTS = {"cohere2": 10_000.0, "cohere": 500_000.0, "olmo3": 500_000.0, "smollm3": 2e6, "minimax_m2": 5e6, "cwm": 1e6}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_the_theta_that_a_file_leaves_out_is_that_of_transformers(kind: str) -> None:
    assert read_of(kind).model.position.theta == DEFAULTS[kind]
