"""Every model fulfils the contract; some are compared with a second implementation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.errors import FieldError, RecipeError
from dtrain.data.batch import Example, Feature
from dtrain.models.cnn import CNN
from dtrain.models.mlp import MLP
from dtrain.models.nn import layers
from dtrain.models.nn.attention import AttentionSpec
from dtrain.models.nn.param import Param, abstract, count, initial, normal
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.models.vit import ViT
from dtrain.parallel.mesh import Mesh
from tests.engines import ENGINES, MODELS, gradients, loss_alone, place, random_batch, worst

EXAMPLE: Example = {"image": Feature((8, 8, 1), "uint8"), "label": Feature((), "int32", 10)}


def initial_state(model: object) -> object:
    return initial(model.params(), jax.random.key(1), "float32")  # pyright: ignore[reportAttributeAccessIssue]


def test_a_truncated_normal_distribution_has_the_given_standard_deviation() -> None:
    assert float(normal(0.02)(jax.random.key(0), (400, 400)).std()) == pytest.approx(0.02, rel=0.01)


def test_initial_values_of_another_type_or_shape_are_refused() -> None:
    for init in (lambda _, shape: jnp.zeros(shape, jnp.int32), lambda *_: jnp.zeros(3)):
        with pytest.raises(RecipeError, match=r"parameter w is declared as float\[2\]"):
            initial({"w": Param((2,), "_", init)}, jax.random.key(0), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_declared(name: str) -> None:
    declared = MODELS[name].params()
    found, shapes = initial_state(MODELS[name]), abstract(declared, "float32")
    assert jax.tree.map(lambda p: (p.shape, p.dtype), found) == jax.tree.map(lambda s: (s.shape, s.dtype), shapes)
    assert sum(leaf.size for leaf in jax.tree.leaves(found)) == count(declared)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_padding_does_not_count(name: str) -> None:
    model, batch = MODELS[name], random_batch(examples=8)
    params = initial_state(model)
    padded = batch | {"weight": np.array([1, 1, 1, 1, 1, 0, 0, 0], np.float32)}
    some = {key: value[:5] for key, value in batch.items()}
    a, b = (loss_alone(model, params, rows) for rows in (padded, some))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6), a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_untrained_model_has_the_loss_of_a_uniform_guess(name: str) -> None:
    loss = loss_alone(MODELS[name], initial_state(MODELS[name]), random_batch(examples=64))
    assert 0.5 * np.log(10) < float(loss.sum / loss.weight) < 2.5 * np.log(10)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_flops_are_what_the_compiler_counts(name: str) -> None:
    """A step is three forward passes. The compiler counts a scanned layer once and does not count padding."""
    model = MODELS[name]
    if model.structure.layers:
        model = dataclasses.replace(model, layers=1)
    batch: Any = random_batch()
    if not model.fixed_size:  # small images are mostly padding
        model = dataclasses.replace(model, image=(160, 160, 1))
        batch = {"image": np.zeros((16, 160, 160, 1), np.float32), "label": np.zeros(16, np.int32)}
    forward = jax.jit(lambda params, batch: model.loss(params, batch, SingleDeviceContext()).sum)
    counted = forward.lower(initial_state(model), batch).compile().cost_analysis()["flops"]
    claimed = model.flops({}, 16, model.params()).step / 3
    assert claimed == pytest.approx(counted, rel=0.25)


@pytest.mark.parametrize("name", MODELS)
def test_examples_that_do_not_fit_are_refused(name: str) -> None:
    model = MODELS[name]
    assert model.mismatch(EXAMPLE) == ""
    assert "8 x 9 x 1" in model.mismatch(EXAMPLE | {"image": Feature((8, 9, 1), "uint8")})
    assert "7" in model.mismatch(EXAMPLE | {"label": Feature((), "int32", 7)})
    assert "takes images and labels" in model.mismatch({"tokens": Feature((5,), "uint16", 10)})


def test_the_mlp_is_that_of_numpy() -> None:
    model, batch = MODELS["mlp"], random_batch(examples=4)
    params = jax.device_get(initial_state(model))
    x = batch["image"].reshape(4, -1)
    for i in range(3):
        x = x @ params[f"layer{i}"]["weight"] + params[f"layer{i}"]["bias"]
        x = np.maximum(x, 0) if i < 2 else x
    logp = x - np.log(np.exp(x).sum(-1, keepdims=True))
    loss = loss_alone(model, params, batch)
    np.testing.assert_allclose(loss.sum, -logp[np.arange(4), batch["label"]].sum(), rtol=1e-5)
    assert float(loss.metrics["accuracy"]) == (x.argmax(-1) == batch["label"]).sum()


@pytest.mark.slow
def test_the_vits_attention_is_that_of_the_paper() -> None:
    """softmax(q k / sqrt(d)) v, for one head at a time."""
    draw = np.random.default_rng(0)
    q, k, v = (draw.normal(size=(2, 5, 3, 4)).astype(np.float32) for _ in range(3))
    found = SingleDeviceContext().attend(*map(jnp.asarray, (q, k, v)), AttentionSpec(0.5, causal=False), None)
    for b in range(2):
        for h in range(3):
            scores = q[b, :, h] @ k[b, :, h].T / 2
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            np.testing.assert_allclose(found[b, :, h], weights @ v[b, :, h], rtol=1e-4, atol=1e-6)


def test_impossible_fields_are_refused() -> None:
    for make, message in (
        (lambda: MLP(sizes=(5,)), "at least two sizes"),
        (lambda: CNN(image=(8, 8, 1), classes=10, stages=(12,)), "group = 8 does not divide 12"),
        (lambda: ViT(image=(9, 8, 1), classes=10), "patch = 4 does not divide the image's height 9"),
        (lambda: ViT(image=(8, 8, 1), classes=10, heads=5), "heads = 5 does not divide width = 64"),
    ):
        with pytest.raises(FieldError, match=message):
            make()


@pytest.mark.parametrize("name", MODELS)
def test_biases_scales_and_running_statistics_are_not_decayed(name: str) -> None:
    for path, param in jax.tree_util.tree_leaves_with_path(MODELS[name].params()):
        assert isinstance(param, Param)
        text = jax.tree_util.keystr(path)
        assert param.decay == (not any(word in text for word in ("bias", "scale", "position", "mean", "variance")))


RESNET34 = CNN(
    image=(224, 224, 3), classes=1000, stages=(64, 128, 256, 512), blocks=(3, 4, 6, 3), stem="imagenet", group=16
)


def test_a_resnet34_has_the_published_size_and_cost() -> None:
    """torchvision's has 21,797,672 parameters, 17,024 of them in normalisations, and 3.66e9 products at 224 x 224."""
    leaves = jax.tree.leaves(RESNET34.params())
    assert sum(param.size for param in leaves if len(param.shape) == 4 or 1000 in param.shape) == 21_797_672 - 17_024
    assert RESNET34.flops({}, 1, RESNET34.params()).step == pytest.approx(6 * 3.66e9, rel=0.01)


def test_the_numbers_of_blocks_must_fit_the_stages() -> None:
    with pytest.raises(FieldError, match="3 numbers for 2 stages"):
        CNN(image=(8, 8, 1), classes=10, stages=(8, 16), blocks=(1, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jit", "shard_map"])
def test_the_stem_of_a_resnet_is_the_same_on_a_mesh(kind: str) -> None:
    model = CNN(image=(8, 8, 1), classes=10, stages=(16, 32), blocks=(1, 2), stem="imagenet")
    loss, found = gradients(place(model, ENGINES[kind], Mesh(data=2, fsdp=2, tensor=2)))
    alone, reference = gradients(place(model, ENGINES["jit"], Mesh(data=1)))
    assert loss == pytest.approx(alone, rel=2e-6)
    assert worst(found, reference) < 1e-5


def test_a_dense_layer_whose_dims_have_no_names_keeps_the_variance() -> None:
    for dims in ("_ _", "embed hidden"):
        tree = initial(layers.dense(256, 256, dims), jax.random.key(0), "float32")
        assert float(tree["weight"].std()) == pytest.approx(1 / 16, rel=0.05)
