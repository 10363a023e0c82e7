"""Classifiers of images in the names of transformers and timm: both ways, against what those libraries compute.

The libraries have an environment of their own, since they need PyTorch: DTRAIN_TEST_HF_PYTHON names its Python.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dtrain.checkpoint.tensors import opened
from dtrain.core.errors import DataError
from dtrain.data.batch import Preparation
from dtrain.models.agreement import described
from dtrain.models.image_configs import NoConfig, image_files, image_model, prepared_as, side
from dtrain.models.nn.param import initial, paths
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.models.resnet import ResNet
from dtrain.models.settings import settings
from dtrain.models.vit import ViT
from dtrain.weights.read import find_tensors, leaves_by_path, own_names, tensor_names, without_padding
from tests.conftest import Dtrain

PYTHON = os.environ.get("DTRAIN_TEST_HF_PYTHON", "")
against_libraries = pytest.mark.skipif(not PYTHON, reason="DTRAIN_TEST_HF_PYTHON names no Python with transformers")
SCRIPT = Path(__file__).with_name("images_reference.py")
PIXELS = Preparation((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
SHAPE = (32, 32, 3)
MODELS: dict[str, ViT | ResNet] = {
    "vit": ViT(
        image=SHAPE, classes=5, patch=8, layers=2, width=48, heads=3, hidden=96, pool="token", bias=True,
        activation="gelu", epsilon=1e-12,
    ),
    "timm-vit": ViT(
        image=SHAPE, classes=5, patch=8, layers=2, width=48, heads=3, hidden=192, pool="token", bias=True,
        activation="gelu",
    ),
    "resnet": ResNet(image=SHAPE, classes=5, stem=8, stages=(8, 16), blocks=(1, 2)),
    "bottleneck": ResNet(image=SHAPE, classes=5, stem=8, stages=(8, 16), blocks=(1, 2), bottleneck=True),
    "timm-resnet": ResNet(image=SHAPE, classes=5, blocks=(1, 1, 2, 1)),
    "timm-bottleneck": ResNet(image=SHAPE, classes=5, blocks=1, bottleneck=True),
}  # fmt: skip
NAMED = [(name, number) for name, model in MODELS.items() for number in range(len(model.namings))]


def reference(*words: str | Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX", "XLA"))}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run([PYTHON, SCRIPT, *words], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("published")
    reference("make", folder)
    yield folder


def written(model: Any, folder: Path, naming: int = 0) -> dict[str, np.ndarray]:
    """A folder with random parameters of the model, in its names of that number, and the files beside it."""
    declared = without_padding(model.params())
    values = leaves_by_path(jax.tree.map(np.asarray, initial(model.params(), jax.random.key(1), "float32")))
    library, tensors = model.namings[naming].library, dict[str, dict[int, np.ndarray]]()
    for name, param in declared.items():
        place = model.namings[naming].places[name]
        named = place.names(param)
        for tensor, part in zip(named, values[name].reshape(len(named), -1), strict=True):
            tensors.setdefault(tensor, {})[place.start] = place.write(part, param)
    joined = {
        name: np.ascontiguousarray(np.concatenate([parts[start] for start in sorted(parts)]))
        for name, parts in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(joined, folder / "model.safetensors")
    for name, text in files_of(model, library).items():
        (folder / name).write_text(json.dumps(text))
    return values


def files_of(model: Any, library: str) -> dict[str, Any]:
    try:
        return image_files(model, library, [], PIXELS)[0]
    except NoConfig:
        return {}


def read_back(model: Any, folder: Path) -> dict[str, np.ndarray]:
    declared = without_padding(model.params())
    with opened(folder) as tensors:
        where = find_tensors(tensors, model, declared, folder)
        return {
            name: where.table[name].read(
                lambda tensor, index: tensors.part(f"{where.prefix}{tensor}", index),
                param,
                [slice(0, size) for size in param.shape],
            )
            for name, param in declared.items()
        }


@against_libraries
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == "vit")) for name in MODELS])
def test_the_published_logits(published: Path, name: str) -> None:
    found = described(published / name)
    assert not found.unserved
    assert not found.unchecked
    model = found.model if found.model.fixed_size else replace(found.model, image=SHAPE)
    assert settings(model) == settings(MODELS[name])
    assert (model.image, model.classes) == (SHAPE, 5)
    values = read_back(model, published / name)
    params = jax.tree.map(lambda path: jnp.asarray(values[path]), paths(model.params()))
    logits = model.logits(params, jnp.asarray(np.load(published / "pictures.npy")), SingleDeviceContext())
    np.testing.assert_allclose(logits, np.load(published / name / "logits.npy"), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("name", "number"), NAMED)
def test_every_parameter_goes_out_and_comes_back(tmp_path: Path, name: str, number: int) -> None:
    model = MODELS[name]
    values = written(model, tmp_path, number)
    with opened(tmp_path) as tensors:
        declared = without_padding(model.params())
        assert tensor_names(tensors, model, declared) == model.namings[number].places
    for path, value in read_back(model, tmp_path).items():
        assert np.array_equal(value, values[path]), path


def test_a_part_of_a_reordered_tensor_is_that_part_of_the_parameter(tmp_path: Path) -> None:
    model = MODELS["vit"]
    values = written(model, tmp_path)
    place, param = model.namings[0].places["embed.weight"], without_padding(model.params())["embed.weight"]
    with opened(tmp_path) as tensors:
        part = place.read(tensors.part, param, [slice(5, 100), slice(12, 24)])
    assert np.array_equal(part, values["embed.weight"][5:100, 12:24])


def test_the_largest_published_ones_are_described_by_their_names() -> None:
    def of(architecture: str, **more: Any) -> Any:
        config = {"architecture": architecture, "num_classes": 1000, "pretrained_cfg": {"input_size": [3, 384, 384]}}
        return image_model(config | more, Path("config.json"))

    large = of("vit_large_patch16_384.augreg_in21k_ft_in1k").model
    assert (large.image, large.layers, large.width, large.heads) == ((384, 384, 3), 24, 1024, 16)
    assert of("resnet101").model.counts == (3, 4, 23, 3)
    assert of("vit_base_patch16_224", global_pool="avg").unserved == ("global_pool: avg",)
    assert of("resnet50", model_args={"output_stride": 8}).unserved == ("model_args.output_stride: 8",)
    with pytest.raises(DataError, match=r"does not support timm's architecture resnet50d\."):
        of("resnet50d.a1_in1k")


@pytest.mark.parametrize("name", MODELS)
def test_what_timm_does_not_compute_alike_has_no_config_of_it(name: str) -> None:
    model = MODELS[name]
    changed = replace(model, epsilon=1e-3) if isinstance(model, ViT) else replace(model, stages=(8, 24, 8, 8), blocks=1)
    with pytest.raises(NoConfig, match=r"epsilon is 1e-06 there, 0\.001 here|numbers|stages"):
        image_files(changed, "timm", [], PIXELS)
    assert files_of(changed, "transformers")


@pytest.mark.parametrize(
    ("about", "wanted"),
    [
        ({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 2]}, ((0.1, 0.2, 0.3), (1.0, 1.0, 2.0))),
        ({"image_mean": 0.5, "image_std": [0.5]}, ((0.5,), (0.5,))),
        ({"image_mean": [9], "image_std": [9], "do_normalize": False}, ((0.0,), (1.0,))),
        # (p / 127.5 - 1) / 1 is (p / 255 - 0.5) / 0.5
        ({"image_mean": [1.0], "image_std": [1.0], "rescale_factor": 1 / 127.5}, ((0.5,), (0.5,))),
        ({"image_mean": [127.5], "image_std": [255.0], "do_rescale": False}, ((0.5,), (1.0,))),
    ],
)
def test_how_pixels_were_normalised_is_read(tmp_path: Path, about: dict[str, Any], wanted: Any) -> None:
    assert prepared_as(tmp_path, 3) is None
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    found = prepared_as(tmp_path, 3)
    assert found
    for ours, theirs in zip(found[:2], wanted, strict=True):
        assert ours == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("values", "message"),
    [(["a"], "expected a number"), ([0.1, 0.2], "one for each of 3 channels"), ([True], "expected a number")],
)
def test_pixels_that_are_no_numbers_are_refused(tmp_path: Path, values: list[Any], message: str) -> None:
    about = {"image_mean": values, "image_std": [1.0]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match=message):
        prepared_as(tmp_path, 3)


def test_the_size_of_pictures_is_read(tmp_path: Path) -> None:
    assert side(tmp_path) is None
    for about, wanted in (
        ({"size": {"shortest_edge": 48}}, (48, 48)),
        ({"size": 40}, (40, 40)),
        ({"crop_size": {"height": 32, "width": 24}, "do_center_crop": True, "size": 64}, (32, 24)),
        ({"size": "large"}, None),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
        assert side(tmp_path) == wanted


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("vit", {"hidden_size": -48}, "hidden_size: expected a whole number from 1"),
        ("vit", {"intermediate_size": None}, "intermediate_size: expected a whole number"),
        ("vit", {"num_attention_heads": 0}, "num_attention_heads: expected a whole number"),
        ("vit", {"image_size": None}, "image_size: expected a whole number"),
        ("vit", {"image_size": [32]}, "image_size: expected a list of 2 numbers"),
        ("vit", {"layer_norm_eps": None}, "layer_norm_eps: expected a number"),
        ("vit", {"num_attention_heads": 5}, "heads = 5 does not divide width = 48"),
        (
            "resnet",
            {"hidden_sizes": [8, "16"]},
            'hidden_sizes: expected a whole number from 1 to 1,000,000; found "16"',
        ),
        ("resnet", {"depths": [1, 2.5]}, "depths: expected a whole number"),
        ("resnet", {"depths": [1]}, "1 numbers for 2 stages"),
        ("resnet", {"embedding_size": 10**9}, "embedding_size: expected a whole number"),
        ("timm-vit", {"model_args": [1]}, "model_args: expected a mapping"),
        ("timm-vit", {"model_args": {"depth": "2"}}, "depth: expected a whole number"),
        ("timm-resnet", {"pretrained_cfg": {"input_size": [3, 32]}}, "input_size: expected a list of 3"),
    ],
)
def test_impossible_values_of_a_config_are_refused(model: str, changes: dict[str, Any], message: str) -> None:
    library = "timm" if model.startswith("timm") else "transformers"
    config = json.loads(json.dumps(files_of(MODELS[model], library)["config.json"])) | changes
    with pytest.raises(DataError, match=re.escape(message)):
        image_model(config, Path("config.json"))


def test_settings_that_dtrain_does_not_serve_are_named() -> None:
    config = files_of(MODELS["resnet"], "transformers")["config.json"]
    assert image_model(config | {"layer_type": "bottlenecks"}, Path("c")).unserved == ('layer_type: "bottlenecks"',)
    config = files_of(MODELS["timm-vit"], "timm")["config.json"]
    arguments = config["model_args"] | {"drop_path_rate": 0.1, "pre_norm": True, "qk_norm": None}
    assert image_model(config | {"model_args": arguments}, Path("c")).unserved == ("model_args.pre_norm: true",)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Pictures of two colours, each with noise, and which one it is."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for number, (name, colour) in enumerate({"blue": (40, 60, 190), "red": (190, 60, 40)}.items()):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for i in range(24):
            noise = draw.integers(-40, 40, SHAPE) + np.array(colour)
            Image.fromarray(noise.clip(0, 255).astype(np.uint8)).save(folder / f"{number}-{i}.png")
    return tmp_path / "photos"


def recipe_of(name: str) -> str:
    about = {
        "vit": "{kind: vit, patch: 8, layers: 2, width: 48, heads: 3, hidden: 96, pool: token, bias: true,"
        " activation: gelu, epsilon: 1e-12}",
        "resnet": "{kind: resnet, stem: 8, stages: [8, 16], blocks: [1, 2]}",
    }[name]
    return (
        f"model: {about}\ninit: {{weights: weights, new: [head.*]}}\n"
        "data: {kind: images, root: photos, size: 32, test: 0.25,"
        " pixels: {mean: [0.4, 0.5, 0.6], std: [0.2, 0.3, 0.25]}}\n"
        "optimizer: {kind: adamw, lr: 1e-3}\nbatch: 8\nsteps: 2\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "name", "override", "message"),
    [
        ("vit", "vit", "model.heads=4", "num_attention_heads: 3  model.heads: 4"),
        ("vit", "vit", "model.epsilon=1e-6", "layer_norm_eps: 1e-12"),
        ("vit", "vit", "model.activation=gelu_tanh", 'hidden_act: gelu  model.activation: "gelu_tanh"'),
        ("vit", "vit", "init.new=[]", 'new last layer: init: {weights: weights, new: ["head.*"]}'),
        ("resnet", "vit", "model.heads=3", "describes a different model"),
        ("vit", "resnet", "model.stem=8", "describes a different model"),
        ("wide", "vit", "data.size=[32, 64]", "image_size: 64 x 32  model.image: [32, 64, 3]"),
    ],
)
def test_weights_of_another_model_are_refused(
    dtrain: Dtrain, tmp_path: Path, photos: Path, given: str, name: str, override: str, message: str
) -> None:
    del photos
    wide = replace(MODELS["vit"], image=(64, 32, 3))
    written(wide if given == "wide" else MODELS[given], tmp_path / "weights")
    (tmp_path / "r.yaml").write_text(recipe_of(name))
    assert message in dtrain("run", "r.yaml", override, code=4).stderr.replace("classifier.", "head.")


@pytest.mark.slow
def test_a_resnet_starts_from_published_parameters_alone_and_keeps_their_statistics(
    dtrain: Dtrain, tmp_path: Path, photos: Path
) -> None:
    del photos
    written(MODELS["resnet"], tmp_path / "weights")
    (tmp_path / "r.yaml").write_text(recipe_of("resnet"))
    refused = dtrain("run", "r.yaml", "init=null", "name=other", code=2).stderr
    assert "batch normalisation uses the means and variances of published parameters" in refused
    assert "compiled" not in refused
    other = dtrain("run", "r.yaml", "name=other", "data.pixels={mean: 0.5}").stderr
    assert "was trained on pixels normalised with mean [0.4, 0.5, 0.6]" in other
    done = dtrain("run", "r.yaml").stderr
    assert "pixels" not in done
    assert "initialised at random: head.bias, head.weight" in done
    dtrain("export", "r", "out")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("weights", "out"))
    counts = {name for name in after if name.endswith("num_batches_tracked")}
    assert after.keys() - before.keys() == counts
    assert {str(after[name].dtype) for name in counts} == {"int64"}
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {name for name in before if "running" in name}
    assert json.loads((tmp_path / "out/config.json").read_text())["id2label"] == {"0": "blue", "1": "red"}


@against_libraries
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["timm-vit", "vit", "resnet"])
def test_photos_and_published_weights_to_predictions_elsewhere(
    dtrain: Dtrain, published: Path, tmp_path: Path, photos: Path, name: str
) -> None:
    """The recipe that is written learns, and the libraries and the program give what `predict` gives."""
    from PIL import Image

    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    shown = dtrain("new", photos, "--weights", published / name, "--out", "r.yaml").stderr
    assert "48 pictures of 2 classes" in shown
    text = (tmp_path / "r.yaml").read_text()
    assert "size: [32, 32]" in text
    pixels = "mean: [0.5, 0.5, 0.5]" if name == "timm-vit" else "mean: [0.4, 0.5, 0.6], std: [0.2, 0.3, 0.25]"
    assert pixels in text
    dtrain("run", "r.yaml", "epochs=6")
    files = [str(path) for path in sorted(photos.glob("*/*.png"))[::5]]
    rows = [json.loads(line) for line in dtrain("predict", "r", *files).stdout.splitlines()]
    assert sum(row["class"] in row["file"] for row in rows) >= len(rows) - 1
    dtrain("export", "r", "out")
    theirs = json.loads(reference("pipeline", tmp_path / "out", *files))
    if name == "timm-vit":  # whose epsilon timm has
        dtrain("export", "r", "out-timm/net", "--names", "timm")
        values = np.stack([np.asarray(Image.open(file)) for file in files]) / 255
        np.save(tmp_path / "pictures.npy", ((values - 0.5) / 0.5).astype(np.float32))
        reference("logits", tmp_path / "out-timm", tmp_path / "pictures.npy")
        logits = np.load(tmp_path / "out-timm" / "net" / "logits.npy")
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        for row, own in zip(rows, shares, strict=True):
            assert row["top"] == pytest.approx(dict(zip(("blue", "red"), map(float, own))), abs=2e-5)
    dtrain("export", "r", "net.stablehlo")
    program = (
        "import json, sys, jax, jax.export, numpy as np\nfrom PIL import Image\n"
        "net = jax.export.deserialize(open('net.stablehlo', 'rb').read())\n"
        "classes = json.load(open('net.stablehlo.json'))['classes']\n"
        "for file in sys.argv[1:]:\n"
        "    row = np.asarray(net.call(np.asarray(Image.open(file))[None]))[0]\n"
        "    print(json.dumps(dict(zip(classes, map(float, row)))))\n"
    )
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py", *files], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for row, own in zip(rows, map(json.loads, done.stdout.splitlines()), strict=True):
        assert row["top"] == pytest.approx(theirs[row["file"]], abs=2e-5)
        assert row["top"] == pytest.approx(own, abs=2e-6)


@pytest.mark.slow
def test_adapters_of_published_weights(dtrain: Dtrain, tmp_path: Path, photos: Path) -> None:
    written(MODELS["resnet"], tmp_path / "weights")
    dtrain("new", photos, "--weights", "weights", "--out", "r.yaml")
    text = (tmp_path / "r.yaml").read_text()
    assert '\n# lora: {rank: 8, targets: ["stage*_block*.conv2"], train: ["head.*"]}' in text
    (tmp_path / "r.yaml").write_text(text.replace("\n# lora:", "\nlora:"))
    dtrain("run", "r.yaml", "epochs=1")
    dtrain("export", "r", "out")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("weights", "out"))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if "layer.1.convolution" in name or "classifier" in name}


def test_own_names_are_still_read(tmp_path: Path) -> None:
    model = MODELS["resnet"]
    declared = without_padding(model.params())
    save_file(
        {name: np.zeros(param.shape, np.float32) for name, param in declared.items()}, tmp_path / "own.safetensors"
    )
    with opened(tmp_path / "own.safetensors") as tensors:
        assert tensor_names(tensors, model, declared) == own_names(declared)


@pytest.mark.slow
def test_a_program_is_of_a_model_that_classifies_pictures(dtrain: Dtrain, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    (tmp_path / "words.txt").write_text("a few words\n" * 200)
    (tmp_path / "text.yaml").write_text(
        "model: {kind: decoder, layers: 1, width: 16, heads: 2}\n"
        "data: {kind: text, files: words.txt, length: 16}\noptimizer: {kind: adamw, lr: 1e-3}\nbatch: 8\nsteps: 1\n"
    )
    dtrain("run", "text.yaml")
    assert "of a model that classifies pictures" in dtrain("export", "text", "net.stablehlo", code=2).stderr
    assert "no --names" in dtrain("export", "text", "net.stablehlo", "--names", "own", code=2).stderr
    assert "net.stablehlo, a program" in dtrain("export", "text", "net.onnx", code=2).stderr
    assert not (tmp_path / "net.stablehlo.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [*(pytest.param(n, marks=pytest.mark.nightly) for n in ("mlp", "cnn")), "{kind: vit, patch: 8}"]
)
def test_every_classifier_of_pictures_can_be_a_program(
    dtrain: Dtrain, tmp_path: Path, photos: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax import export
    from PIL import Image

    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        f"model: {model}\ndata: {{kind: images, root: photos, size: 32, test: 0.25}}\n"
        "optimizer: {kind: adamw, lr: 1e-3}\nbatch: 8\nsteps: 2\n"
    )
    dtrain("run", "r.yaml")
    dtrain("export", "r", "net.stablehlo")
    files = [str(path) for path in sorted(photos.glob("*/*.png"))[::16]]
    rows = [json.loads(line) for line in dtrain("predict", "r", *files).stdout.splitlines()]
    classes = json.loads(Path("net.stablehlo.json").read_text())["classes"]
    pictures = np.stack([np.asarray(Image.open(file)) for file in files])
    found = np.asarray(export.deserialize(bytearray(Path("net.stablehlo").read_bytes())).call(pictures))
    for row, own in zip(rows, found, strict=True):
        assert row["top"] == pytest.approx(dict(zip(classes, map(float, own), strict=True)), abs=2e-6)
