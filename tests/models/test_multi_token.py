"""Layers that predict further tokens: their loss in packed rows, names in published files, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dtrain.checkpoint.tensors import opened
from dtrain.core.errors import DataError, FieldError
from dtrain.data.batch import Feature
from dtrain.models.altup import AltUp
from dtrain.models.decoder import Decoder
from dtrain.models.families.config import config_of
from dtrain.models.latent import Latent
from dtrain.models.layer_pattern import LayerKind
from dtrain.models.lora import Adapted, Lora
from dtrain.models.moe import Experts
from dtrain.models.multi_token import MultiToken
from dtrain.models.nn.param import Tree, initial, paths
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.models.rope import Learned
from dtrain.weights.export import export
from dtrain.weights.load import LoadedRun
from dtrain.weights.read import find_tensors, leaves_by_path, read
from tests.conftest import Dtrain
from tests.models.random_decoders import parameters, written
from tests.models.test_agreement import read_of

ROW = {"token": Feature((24,), "int32"), "target": Feature((24,), "int32")}
SIZES: dict[str, Any] = {"vocab": 32, "context": 24, "layers": 2, "width": 16, "heads": 2, "hidden": 24, "init": 0.3}
PLAIN = Decoder(**SIZES)
OWN = replace(PLAIN, multi_token=MultiToken(depth=2, weight=0.7))
DEEPSEEK = Decoder(
    **SIZES | {"layers": 3}, head_dim=12, latent=Latent(rank=10, query_rank=14, rotated=4, value_dim=6), epsilon=1e-6,
    experts=Experts(count=4, active=2, hidden=12, shared=1, score="sigmoid", bias=True, balance=0.0),
    pattern=(LayerKind(dense=True), LayerKind(count=2)), multi_token=MultiToken(depth=2),
)  # fmt: skip


def losses(model: Decoder, params: Tree, **batch: np.ndarray) -> tuple[float, float, float]:
    """The sums of the loss, of the cross-entropy of the next token and of that of further ones."""
    found = jax.jit(lambda params: model.loss(params, batch, SingleDeviceContext()))(params)
    return float(found.sum), float(found.metrics["nll"]), float(found.metrics["further_nll"])


def test_the_loss_is_that_of_the_next_token_and_the_mean_of_further_ones() -> None:
    """The layer's prediction of the token that the model predicts next, one place later, is learned as well."""
    params, token = parameters(OWN, 0), np.random.default_rng(0).integers(32, size=(2, 10))
    target = np.concatenate([token[:, 1:], np.full((2, 1), -1)], 1)
    total, nll, further = losses(OWN, params, token=token, target=target)
    assert total == pytest.approx(nll + 0.7 * further, rel=1e-6)
    alone = {name: value for name, value in params.items() if name != "multi_token"}
    own = jax.jit(lambda params: PLAIN.loss(params, {"token": token, "target": target}, SingleDeviceContext()))(alone)
    assert nll == pytest.approx(float(own.sum), rel=1e-6)
    # 8 and 7 tokens of each row are predicted two and three places ahead, by layers that know nothing yet
    flat = {**params, "head": np.zeros_like(params["head"])}
    assert losses(OWN, flat, token=token, target=target)[2] == pytest.approx(2 * (8 + 7) / 2 * np.log(32), rel=1e-6)


def test_no_token_of_another_document_is_predicted_or_read() -> None:
    """Two documents in a row give the losses that they give alone; tokens that are not learned are none of them."""
    params, draw = parameters(OWN, 1), np.random.default_rng(1)
    documents = [draw.integers(32, size=(1, size)) for size in (9, 7)]
    targets = [np.concatenate([one[:, 1:], [[-1]]], 1) for one in documents]
    targets[0][:, :3] = -1  # a prompt
    apart = [losses(OWN, params, token=x, target=y) for x, y in zip(documents, targets, strict=True)]
    both = losses(
        OWN, params, token=np.concatenate(documents, 1), target=np.concatenate(targets, 1),
        document=np.repeat([[0, 1]], (9, 7), axis=1), position=np.concatenate([np.arange(9), np.arange(7)])[None],
    )  # fmt: skip
    np.testing.assert_allclose(both, np.sum(apart, 0), rtol=2e-6)


def test_files_of_deepseek_have_the_layers_after_the_models_own(tmp_path: Path) -> None:
    params = parameters(DEEPSEEK, 0)
    written(DEEPSEEK, params, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    projection = params["multi_token"]["1"]["projection"]
    assert np.array_equal(tensors["model.layers.3.eh_proj.weight"], projection.T)
    assert {"model.layers.4.shared_head.norm.weight", "model.layers.4.mlp.experts.3.up_proj.weight"} <= tensors.keys()
    copies = {f"model.layers.3.{name}.weight": np.ones((2, 2)) for name in ("embed_tokens", "shared_head.head")}
    save_file(tensors | copies, tmp_path / "out" / "model.safetensors")

    def taken(model: Decoder, name: str = "out") -> tuple[dict[str, Any], list[str]]:
        here, said, declared = jax.sharding.SingleDeviceSharding(jax.devices()[0]), list[str](), model.params()
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, "float32", sharding=here), declared)
        own = leaves_by_path(declared)
        with opened(tmp_path / name) as files:
            where = find_tensors(files, model, own, tmp_path / name, say=said.append)
            return read(files, where, own, leaves_by_path(shapes)), said

    found, said = taken(DEEPSEEK)
    assert said == [f"{tmp_path / 'out'}: not read: 2 tensors of copies of the embedding and the head"]
    for name, value in leaves_by_path(params).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    found, said = taken(replace(DEEPSEEK, multi_token=None))
    assert not any(name.startswith("multi_token") for name in found)
    further = sum(name.startswith(("model.layers.3.", "model.layers.4.")) for name in {**tensors, **copies})
    assert f"not read: {further - 2} tensors of layers that predict further tokens" in said[0]
    with pytest.raises(DataError, match=r"model\.layers\.5\.") as caught:
        taken(replace(DEEPSEEK, multi_token=MultiToken(depth=3)))
    assert "multi_token" not in caught.value.hint  # the file has some
    alone = {name: value for name, value in params.items() if name != "multi_token"}
    written(replace(DEEPSEEK, multi_token=None), alone, tmp_path / "plain")
    with pytest.raises(DataError, match=r"model\.layers\.3\.") as caught:
        taken(DEEPSEEK, "plain")
    assert 'new: ["multi_token.*"]' in caught.value.hint


def test_other_families_are_written_without_them(tmp_path: Path) -> None:
    learned = replace(
        PLAIN, position=Learned(), norm="layer", norm_bias=True, bias=True, tied=True, feed_forward="gelu"
    )
    for plain in (PLAIN, learned):
        further = replace(plain, multi_token=MultiToken())
        said = written(further, parameters(further, 0), tmp_path / "out")
        assert any(
            re.fullmatch(r"left out: \d+ parameters of model\.multi_token, for which \w+ has no names", x) for x in said
        )
        single = written(further, parameters(further, 0), tmp_path / "one.safetensors", names="published")
        assert single[1:] == [x for x in said if x.startswith("left out")]
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        written(plain, parameters(plain, 0), tmp_path / "plain")
        assert tensors.keys() == load_file(tmp_path / "plain" / "model.safetensors").keys()
    exaone = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_shared_experts": 1}
    model = replace(read_of("exaone_moe", **exaone).model, multi_token=MultiToken())
    config = config_of(model)
    assert config is not None
    assert config["num_nextn_predict_layers"] == 0  # its own have other names


def test_their_adapters_are_left_out_of_those_for_peft(tmp_path: Path) -> None:
    """The base there has no such layers."""
    lora = Lora(rank=2, targets=("blocks.query.weight", "multi_token.*.projection"))
    declared = Adapted(OWN, lora).params()["lora"]
    adapters = {f"lora.{name}": pair for name, pair in initial(declared, jax.random.key(0), "float32").items()}
    recipe: Any = SimpleNamespace(name="run", model=OWN)
    assembly: Any = SimpleNamespace(layout=SimpleNamespace(declared=OWN.params()))
    run = LoadedRun(recipe, assembly, parameters(OWN, 0), 0, "step 0", adapters=adapters, lora=lora)
    said = export(run, tmp_path, adapters=True, base="llama")
    assert said[-1] == "left out: 2 adapters of model.multi_token"
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert len(names) == 2 * OWN.layers
    assert not [name for name in names if "eh_proj" in name]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"altup": AltUp()}, "multi_token and altup exclude each other"),
        ({"layer_inputs": 4}, "multi_token and layer_inputs exclude each other"),
        ({"pattern": (LayerKind(), LayerKind(shared_keys=True))}, "shares the keys of another layer"),
    ],
)
def test_what_does_not_go_with_them_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        replace(OWN, **settings)


def test_recipes_that_would_not_train_them_are_refused(dtrain: Dtrain) -> None:
    further = "model.multi_token={depth: 1}"
    shown = dtrain("check", "dpo-tiny", further, code=2).stderr
    assert "dpo does not train what model.multi_token adds to the model; leave model.multi_token out" in shown
    shown = dtrain("run", "decoder-tiny", further, "mesh={data: 1, sequence: 2}", "--devices", "2", code=2).stderr
    assert "sequence" in shown
    assert "whole rows" in shown


def test_each_is_counted_with_its_head() -> None:
    plain, own = (model.flops(ROW, 1, model.params()).step for model in (PLAIN, OWN))
    layer = sum(param.size for param in jax.tree.leaves(OWN.params()["multi_token"]["1"]))
    scores = 2 * 16 * (24 + 1) / 2  # of queries and keys, and sums of values: width x mean keys
    assert own - plain == pytest.approx(2 * 6 * 24 * (layer + 32 * 16 + scores))


def test_their_parameters_have_paths_of_their_own() -> None:
    names = set(jax.tree.leaves(paths(OWN.params())))
    assert {"multi_token.1.projection", "multi_token.2.block.query.weight", "multi_token.2.norm.scale"} <= names
