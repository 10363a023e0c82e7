"""Import and export of parameters: the published names both ways, and files that do not match the model."""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dtrain.checkpoint.tensors import Tensors, opened
from dtrain.core.errors import DataError
from dtrain.core.run_dir import Folder
from dtrain.models.decoder import Decoder
from dtrain.models.families.config import config_of, published_model
from dtrain.models.families.tensors import namings
from dtrain.models.layer_pattern import LayerKind
from dtrain.models.mlp import MLP
from dtrain.models.moe import Experts
from dtrain.models.nn.param import paths
from dtrain.models.rope import Learned, Llama3, Rope
from dtrain.train.import_run import import_published
from dtrain.weights.load import load_run
from dtrain.weights.peft import read_config
from dtrain.weights.read import find_tensors, leaves_by_path, read, without_padding
from tests.conftest import SHARED, Dtrain

RECIPE = """
model: {kind: mlp, sizes: [64, 16, 10]}
data: digits
optimizer: {kind: adamw, lr: 1e-3, ema: 0.9}
batch: 64
steps: 10
"""
LLAMA = Decoder(vocab=32, context=16, layers=2, width=8, heads=2, kv_heads=1, hidden=12)
FAMILIES = {
    "llama": (LLAMA, "model.layers.1.self_attn.k_proj.weight", (4, 8)),
    "llama-bias": (dataclasses.replace(LLAMA, bias=True), "model.layers.1.mlp.gate_proj.bias", (12,)),
    "qwen2": (dataclasses.replace(LLAMA, qkv_bias=True, tied=True), "model.layers.0.self_attn.v_proj.bias", (4,)),
    "gemma2": (
        dataclasses.replace(LLAMA, post_norm=True, norm_offset=True, tied=True),
        "model.layers.1.pre_feedforward_layernorm.weight",
        (8,),
    ),
    "qwen3-moe": (
        dataclasses.replace(LLAMA, qk_norm=True, hidden=None, experts=Experts(count=3, active=2, hidden=6)),
        "model.layers.1.mlp.experts.2.down_proj.weight",
        (8, 6),
    ),
    "gpt2": (
        dataclasses.replace(
            LLAMA, kv_heads=None, feed_forward="gelu", position=Learned(), norm="layer", norm_bias=True, bias=True,
            tied=True,
        ),
        "h.1.attn.c_attn.weight",
        (8, 24),
    ),
}  # fmt: skip


def here(model: Any) -> Any:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, "float32", sharding=place), model.params())


def read_tree(tensors: Tensors, model: Any, shapes: Any, source: Path) -> Any:
    """The parameters of files as the model's tree."""
    ours = without_padding(model.params())
    values = read(tensors, find_tensors(tensors, model, ours, source), ours, leaves_by_path(shapes))
    return jax.tree.unflatten(jax.tree.structure(shapes), values.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_published_name_and_shape(family: str) -> None:
    model, name, shape = FAMILIES[family]
    declared = dict(zip(jax.tree.leaves(paths(model.params())), jax.tree.leaves(model.params()), strict=True))
    table = namings(model)[0].places
    assert not declared.keys() - table.keys()
    found = {
        tensor: table[ours].shape(param) for ours, param in declared.items() for tensor in table[ours].names(param)
    }
    assert found[name] == shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mixtral", "gpt2"))]
)
def test_a_published_checkpoint_goes_in_and_comes_out_as_it_was(dtrain: Dtrain, tmp_path: Path, name: str) -> None:
    folder = SHARED / "data" / "hf_tiny" / name
    if not folder.is_dir():
        pytest.skip("the small published checkpoints are not beside this checkout")
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    model = {
        "llama": "kv_heads: 2, head_dim: 16, hidden: 128, epsilon: 1e-6",
        "mixtral": "kv_heads: 2, head_dim: 16, position: {kind: rope, theta: 1e6},"
        " experts: {count: 4, active: 2, hidden: 96, balance: 0}",
        "gpt2": "feed_forward: gelu_tanh, position: {kind: learned}, norm: layer, norm_bias: true, bias: true,"
        " tied: true",
    }[name]
    (tmp_path / "small.yaml").write_text(
        f"model: {{kind: decoder, vocab: {vocab}, context: 128, layers: 2, width: 64, heads: 4, {model}}}\n"
        "data: {kind: text, files: [words.txt], length: 32}\noptimizer: {kind: adamw, lr: 1e-3}\nbatch: 8\nsteps: 2\n"
    )
    shown = dtrain("import", "small.yaml", folder).stderr  # without the data
    assert "checked" not in shown
    refused = dtrain("import", "small.yaml", folder, "name=other", "model.epsilon=1e-3", code=4).stderr
    assert "model.epsilon: 0.001" in refused
    dtrain("export", "runs/small", "out.safetensors", "--names", "published")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out.safetensors")
    bare = {name.removeprefix("transformer."): values for name, values in before.items()}
    tied = {"lm_head.weight"} if "lm_head.weight" not in after else set()
    assert bare.keys() - tied == after.keys()
    assert all(np.array_equal(values, bare[name]) for name, values in after.items())
    (tmp_path / "words.txt").write_text("to be or not to be " * 400)
    done = dtrain("run", "small.yaml")
    assert f"starting from the parameters of {folder.absolute()}" in done.stderr
    assert "the same bits" not in done.stderr


@pytest.mark.slow
def test_an_imported_run_of_epochs_is_listed_as_one_that_was_not_trained(dtrain: Dtrain, tmp_path: Path) -> None:
    words = ("steps=null", "epochs=1", "optimizer.schedule=cosine")
    (tmp_path / "small.yaml").write_text(RECIPE)
    dtrain("run", "small.yaml", "steps=2")
    dtrain("import", "small.yaml", "runs/small", "name=next", *words)
    listed = {one["name"]: one["state"] for one in json.loads(dtrain("ls", "--json").stdout)}
    assert listed == {"next": "imported", "small": "finished"}
    assert "has imported parameters, and was not trained yet" in dtrain("report", "next", code=2).stderr


@pytest.mark.slow
def test_what_one_run_learned_another_begins_with(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    dtrain("run", "small.yaml", "steps=200")
    dtrain("export", "runs/small", "out.safetensors")
    dtrain("import", "small.yaml", "out.safetensors", "name=next", "batch=32")
    dtrain("export", "runs/next", "again.safetensors")
    first, second = load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "again.safetensors")
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert first.keys() == second.keys()


def header(values: Any, body: bytes = b"") -> bytes:
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"", "cannot be read as safetensors"),
        ("a.safetensors", struct.pack("<Q", 2**60) + b"{}", "header too large"),
        ("a.safetensors", header(b"{" * 100), "cannot be read as safetensors"),
        ("a.safetensors", header({"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}), "cannot be read"),
        ("a.safetensors", header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "cannot be"),
        ("model.bin", b"\x80\x04.", "is in pickle format"),
        ("model.pkl", b"\x80\x04.", "is in pickle format"),
    ],
)
def test_a_file_that_is_not_valid_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message), opened(tmp_path / name):
        pass
    if name.startswith("model"):
        with pytest.raises(DataError, match=message), opened(tmp_path):
            pass


def test_a_head_that_is_not_the_embedding_is_not_dropped(tmp_path: Path) -> None:
    model = dataclasses.replace(LLAMA, tied=True)
    declared = dict(zip(jax.tree.leaves(paths(model.params())), jax.tree.leaves(model.params()), strict=True))
    table, draw = namings(model)[0].places, np.random.default_rng(0)
    tensors = {
        one: draw.normal(size=table[ours].shape(param)).astype(np.float32)
        for ours, param in declared.items()
        for one in table[ours].names(param)
    }
    for head, fits in ((tensors["model.embed_tokens.weight"], True), (draw.normal(size=(32, 8)), False)):
        save_file(tensors | {"lm_head.weight": head.astype(np.float32)}, tmp_path / "m.safetensors")
        with opened(tmp_path / "m.safetensors") as found:
            if fits:
                read_tree(found, model, here(model), tmp_path)
            else:
                with pytest.raises(DataError, match=r"differs from the embedding, but the recipe has .*tied: true"):
                    read_tree(found, model, here(model), tmp_path)


def test_tensors_of_another_model_are_named(tmp_path: Path) -> None:
    model = MLP(sizes=(4, 3))
    names = jax.tree.leaves(paths(model.params()))
    good = {name: np.zeros(p.shape, np.float32) for name, p in zip(names, jax.tree.leaves(model.params()), strict=True)}

    def problem(tensors: dict[str, np.ndarray]) -> str:
        save_file(tensors, tmp_path / "m.safetensors")
        with pytest.raises(DataError) as caught, opened(tmp_path / "m.safetensors") as found:
            read_tree(found, model, here(model), tmp_path / "m.safetensors")
        return caught.value.message

    assert "stranger is not a parameter of the model" in problem(good | {"stranger": np.zeros(2, np.float32)})
    assert ", in the model " in problem(good | {names[0]: np.zeros((9, 9), np.float32)})
    assert "has dtype I32" in problem({name: values.astype(np.int32) for name, values in good.items()})
    other = problem({"w": np.zeros(2, np.float32)})
    assert "is of another model: none of its 1 tensors has a name of the recipe's" in other
    assert f"{names[0]} is missing" in other


def test_a_file_of_another_architecture_is_named(tmp_path: Path) -> None:
    """For both architectures with published names, with and without a prefix."""
    gpt2 = FAMILIES["gpt2"][0]
    for model, name, family in (
        (LLAMA, "wte.weight", "GPT-2"),
        (LLAMA, "transformer.wte.weight", "GPT-2"),
        (gpt2, "model.embed_tokens.weight", "Llama"),
    ):
        save_file({name: np.zeros((32, 8), np.float32)}, tmp_path / "m.safetensors")
        with (
            opened(tmp_path / "m.safetensors") as found,
            pytest.raises(DataError, match=f"parameter names of {family};"),
        ):
            read_tree(found, model, here(model), tmp_path)
    save_file({"gpt_neox.embed_in.weight": np.zeros((32, 8), np.float32)}, tmp_path / "m.safetensors")
    with opened(tmp_path / "m.safetensors") as found, pytest.raises(DataError, match="is of another model: none of"):
        read_tree(found, LLAMA, here(LLAMA), tmp_path)


def parameters(model: Any) -> dict[str, np.ndarray]:
    """Tensors of the model under their published names."""
    declared = dict(zip(jax.tree.leaves(paths(model.params())), jax.tree.leaves(model.params()), strict=True))
    table, draw = namings(model)[0].places, np.random.default_rng(0)
    return {
        one: draw.normal(size=table[ours].shape(param)).astype(np.float32)
        for ours, param in declared.items()
        for one in table[ours].names(param)
    }


def test_the_index_of_a_folder_is_followed(tmp_path: Path) -> None:
    tensors = parameters(LLAMA)
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in halves.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    save_file({"other": np.zeros(1, np.float32), names[0]: tensors[names[0]]}, tmp_path / "consolidated.safetensors")
    with pytest.raises(DataError, match="is in more than one file"), opened(tmp_path):
        pass
    index = {"weight_map": {name: file for file, own in halves.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    said: list[str] = []
    with opened(tmp_path) as found:
        ours = unpadded_shapes(LLAMA)
        find_tensors(found, LLAMA, ours, tmp_path, say=said.append)
    assert said == [f"{tmp_path}: not read, not of the model: consolidated.safetensors"]
    (tmp_path / "model-2.safetensors").unlink()
    lost = f"lacks model-2.safetensors, which .* lists with {len(names) // 2} of {len(names)} tensors|is not there"
    with pytest.raises(DataError, match=lost), opened(tmp_path):
        pass
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(DataError, match="cannot be read as an index of tensors"), opened(tmp_path):
        pass


def test_an_adapter_beside_the_weights_is_not_taken_for_them(tmp_path: Path) -> None:
    save_file(parameters(LLAMA), tmp_path / "model.safetensors")
    save_file({"base_model.x": np.zeros(1, np.float32)}, tmp_path / "adapter_model.safetensors")
    with opened(tmp_path) as found:
        find_tensors(found, LLAMA, unpadded_shapes(LLAMA), tmp_path)
        assert found.left_out == ("adapter_model.safetensors",)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_the_prefix_of_a_wrapped_model_is_left_out_and_named(tmp_path: Path, prefix: str) -> None:
    save_file({f"{prefix}{name}": value for name, value in parameters(LLAMA).items()}, tmp_path / "m.safetensors")
    said: list[str] = []
    with opened(tmp_path / "m.safetensors") as found:
        find_tensors(found, LLAMA, unpadded_shapes(LLAMA), tmp_path, say=said.append)
    assert said == [f"{tmp_path}: the tensors have the prefix {prefix!r} of a wrapped model, which is left out"]


def unpadded_shapes(model: Any) -> dict[str, Any]:
    return without_padding(model.params())


def test_a_model_without_its_head_is_named(tmp_path: Path) -> None:
    tensors = {
        name.removeprefix("model."): values for name, values in parameters(LLAMA).items() if "lm_head" not in name
    }
    save_file(tensors, tmp_path / "m.safetensors")
    with opened(tmp_path / "m.safetensors") as found, pytest.raises(DataError, match="without its head") as refused:
        read_tree(found, LLAMA, here(LLAMA), tmp_path)
    assert "AutoModelForCausalLM" in refused.value.hint


def test_a_number_as_text_is_named_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config.json: hidden_size is the text '8', not a number"):
        published_model({"model_type": "llama", "hidden_size": "8"}, 8, tmp_path / "config.json")


def test_the_original_length_of_llama3_may_stand_at_the_top() -> None:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
    }
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {"model_type": "llama", **sizes, "rope_scaling": scaling, "original_max_position_embeddings": 64}
    position = published_model(config, 8, Path("config.json")).model.position
    assert isinstance(position, Rope) and isinstance(position.scaling, Llama3) and position.scaling.original == 64


@pytest.mark.parametrize(
    ("field", "refused"),
    [({}, ""), ({"lora_bias": False, "peft_version": "0.21"}, ""),
     ({"layer_replication": [[0, 2]]}, "layer_replication"),
     ({"some_new_method": {"a": 1}}, "some_new_method"), ({"some_new_method": None}, "")],
)  # fmt: skip
def test_fields_of_an_adapter_that_are_not_known_are_refused(tmp_path: Path, field: Any, refused: str) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | field))
    if not refused:
        assert read_config(tmp_path)["r"] == 2
        return
    with pytest.raises(DataError, match=f"{refused}: .* is not supported"):
        read_config(tmp_path)


def test_layers_with_and_without_experts_are_imported_with_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And layers that predict further tokens are left out, by name; the recipe's patterns find both kinds of layers."""
    monkeypatch.chdir(tmp_path)
    mixture = Experts(count=4, active=2, hidden=6, shared=1, score="sigmoid", bias=True)
    model = dataclasses.replace(
        LLAMA, layers=3, hidden=12, experts=mixture, pattern=(LayerKind(dense=True), LayerKind(count=2)), tied=False
    )
    tensors, config = parameters(model), config_of(model)
    assert config is not None
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.gate.e_score_correction_bias"} <= tensors.keys()
    further = {f"model.layers.3.{name}": np.zeros((2, 2), np.float32) for name in ("eh_proj.weight", "enorm.weight")}
    folder = tmp_path / "Published"
    folder.mkdir()
    save_file(tensors | further, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    notes: list[str] = []
    recipe = import_published(folder, "mine", [], None, Path("runs"), notes.append)
    what = "layers that predict further tokens, which model.multi_token trains"
    assert f"{folder}: not read: 2 tensors of {what}" in notes
    assert '"blocks.*.query.weight"' in recipe.read_text()
    about = {"name": "Published", "license": "mit", "model_type": config["model_type"]}
    assert json.loads((tmp_path / "runs" / "mine" / "base.json").read_text()) == about
    run = load_run(Folder(tmp_path / "runs" / "mine"), [], notes.append)
    stacks: Any = run.params["blocks"]
    np.testing.assert_array_equal(stacks["dense"]["mlp"]["up"][0].T, tensors["model.layers.0.mlp.up_proj.weight"])
    for row, number in enumerate((1, 2)):
        wanted = tensors[f"model.layers.{number}.mlp.experts.3.down_proj.weight"]
        np.testing.assert_array_equal(stacks["sparse"]["moe"]["experts"]["down"][row, 3].T, wanted)
    more = {"model.layers.3.mlp.up_proj.weight": np.zeros((12, 8), np.float32)}
    save_file(tensors | more, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"layers\.3\.mlp\.up_proj\.weight is not a parameter of the model"):
        import_published(folder, "other", [], None, Path("runs"), notes.append)
