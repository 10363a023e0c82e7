"""Predictions and evaluations of trained models: the same on every engine and mesh, and what a run itself measured."""

import base64
import csv
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from dtrain.assembly.assemble import assemble
from dtrain.assembly.state import create_state
from dtrain.core.errors import DataError, RecipeError
from dtrain.core.run_dir import Folder
from dtrain.data import digits
from dtrain.data.arrays import Arrays, image_example
from dtrain.data.chat import Chat
from dtrain.data.prediction_inputs import inputs, opened_in_order, with_classes
from dtrain.data.windows import row_example
from dtrain.inference.evaluate import evaluate
from dtrain.inference.outputs import outputs, state_of
from dtrain.inference.predict import predictions
from dtrain.recipe.load import load
from dtrain.weights.load import LoadedRun
from tests.conftest import Dtrain

RECIPES = Path(__file__).parents[2] / "recipes"
EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["batch=16", "steps=60", "epochs=null"]
DECODER = [*SMALL, "model={kind: decoder, vocab: 256, context: 16, layers: 2, width: 16, heads: 4}", "data.length=16"]
EXPERTS = [*DECODER, "model.experts={count: 4, active: 2, hidden: 8}"]
MODELS: dict[str, tuple[Path, list[str]]] = {
    "mlp": (RECIPES / "mlp-digits.yaml", SMALL),
    "cnn": (
        RECIPES / "mlp-digits.yaml",
        [*SMALL, "model={kind: cnn, image: [8, 8, 1], classes: 10, stages: [16, 32]}"],
    ),
    "vit": (RECIPES / "mlp-digits.yaml", [*SMALL, "model={kind: vit, image: [8, 8, 1], classes: 10, width: 16}"]),
    "decoder": (RECIPES / "decoder-tiny.yaml", DECODER),
    "experts": (RECIPES / "decoder-tiny.yaml", EXPERTS),
    "plain_jax": (EXAMPLES / "plain_jax.yaml", SMALL),
}
MESHES = {
    "jit-fsdp-tensor": ["engine=jit", "mesh={data: 2, fsdp: 2, tensor: 2}"],
    "shard_map-fsdp-tensor": ["engine=shard_map", "mesh={data: 2, fsdp: 2, tensor: 2}"],
    "pmap": ["engine=pmap", "mesh={data: 8}"],
}
OF_TOKENS = {
    "shard_map-sequence": ["engine=shard_map", "mesh={data: 2, sequence: 2, tensor: 2}"],
    "jit-sequence": ["engine=jit", "mesh={data: 2, sequence: 2, tensor: 2}"],
    "shard_map-pipeline": ["engine=shard_map", "mesh={data: 4, pipeline: 2}"],
    "jit-pipeline": ["engine=jit", "mesh={data: 4, pipeline: 2}"],
}


def fresh(name: str, place: Sequence[str], devices: int) -> LoadedRun:
    """A run that was initialised and not trained."""
    path, settings = MODELS[name]
    recipe = load(path, [*settings, *place])
    source = recipe.data.open("train")
    assembly = assemble(recipe, jax.devices()[:devices], source.example, 60)
    return LoadedRun(recipe, assembly, create_state(assembly.make, assembly.shapes).params, 0, "step 0")


def predicted(loaded: LoadedRun, examples: int = 40) -> dict[str, np.ndarray]:
    """The predictions for the first examples of the test split: not a multiple of the batch."""
    source = loaded.recipe.data.open("test")
    rows, state = source.rows(np.arange(examples)), state_of(loaded)
    program = outputs(loaded.assembly, Arrays(rows, source.example, ""), state=state)
    parts = [values for _, values in program(state)]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


CASES = [(name, case) for name in MODELS for case in MESHES if not (case == "pmap" and name == "experts")]
CASES += [(name, case) for name in ("decoder",) for case in OF_TOKENS]
CASES = [(name, case) for name, case in CASES if not (name == "plain_jax" and "tensor" in case)]
IN_CI = {("mlp", "shard_map-fsdp-tensor"), ("decoder", "shard_map-sequence"), ("plain_jax", "pmap")}
"""Some of each kind; the full product at night."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(*case, marks=() if case in IN_CI else pytest.mark.nightly) for case in CASES]
)
def test_predictions_are_those_of_one_device(name: str, case: str) -> None:
    own = predicted(fresh(name, (MESHES | OF_TOKENS)[case], 8))
    reference = predicted(fresh(name, ["mesh={data: 1}"], 1))
    assert own.keys() == reference.keys()
    assert all(value.shape[0] == 40 for value in own.values())
    for key, value in own.items():
        np.testing.assert_allclose(value, reference[key], rtol=2e-5, atol=1e-6)


def test_the_losses_of_rows_add_up_to_the_loss_of_the_evaluation() -> None:
    loaded = fresh("decoder", ["mesh={data: 1}"], 1)
    values, source = predicted(loaded), loaded.recipe.data.open("test")
    rows = Arrays(source.rows(np.arange(40)), source.example, "")
    expected = evaluate(loaded, rows)
    assert expected.confusion is None
    assert values["nll"].sum() / values["tokens"].sum() == pytest.approx(expected.metrics["loss"], rel=1e-5)
    assert expected.metrics["perplexity"] == pytest.approx(math.exp(expected.metrics["loss"]))
    assert "bits_per_byte" not in expected.metrics  # arrays do not know the bytes of their tokens


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Sixty small images of two classes: dark and light."""
    random = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        for i in range(30):
            path = tmp_path / "photos" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(level - 30, level + 30, (9, 7, 3), np.uint8)).save(path)
    (tmp_path / "photos.yaml").write_text(
        "model: {kind: mlp, sizes: [192, 16, 2]}\n"
        "data: {kind: images, root: photos, size: [8, 8], test: 0.2, cache: cache}\n"
        "optimizer: {kind: adamw, lr: 0.01}\nbatch: 16\nsteps: 40\n"
    )
    return tmp_path / "photos"


@pytest.mark.slow
def test_what_was_trained_on_folders_names_the_classes_of_new_files(dtrain: Dtrain, photos: Path) -> None:
    dtrain("run", "photos.yaml")
    measured = Folder(photos.parent / "runs" / "photos")
    shown = dtrain("evaluate", "runs/photos", "--json")
    found = json.loads(shown.stdout)
    last = json.loads(measured.metrics.read_text().splitlines()[-1])
    assert found["metrics"]["loss"] == last["eval/loss"]
    assert found["classes"] == ["dark", "light"]
    assert sum(map(sum, found["confusion"])) == found["examples"]
    assert found["accuracy_of_class"] == {"dark": 1.0, "light": 1.0}
    text = dtrain("evaluate", "runs/photos", "--split", "train").stdout
    assert "light        " in text
    assert "confusion matrix" in text

    (photos.parent / "new").mkdir()
    for name, level in (("night", 30), ("day", 220)):
        Image.fromarray(np.full((20, 30, 3), level, np.uint8)).save(photos.parent / "new" / f"{name}.jpg")
    lines = [json.loads(line) for line in dtrain("predict", "runs/photos", "new").stdout.splitlines()]
    assert [(line["file"], line["class"]) for line in lines] == [("new/day.jpg", "light"), ("new/night.jpg", "dark")]
    assert lines[0]["top"]["light"] == lines[0]["probability"] > 0.9
    dtrain("predict", "runs/photos", "new/*.jpg", "--out", "out/labels.csv", "--top", "1")
    with (photos.parent / "out" / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == ["light", "dark"]
    assert list(rows[0]) == ["file", "class", "probability", "class1", "probability1"]

    assert "ends in .jsonl or .csv" in dtrain("predict", "runs/photos", "new", "--out", "x.xls", code=2).stderr
    assert "no file of an image matches nothing" in dtrain("predict", "runs/photos", "nothing", code=4).stderr
    (photos.parent / "new" / "text.png").write_text("no image")
    passed = dtrain("predict", "runs/photos", "new", code=4)
    lines = [json.loads(line) for line in passed.stdout.splitlines()]
    assert [line.get("class") for line in lines] == ["light", "dark", None]  # the others are predicted
    assert lines[2]["file"] == "new/text.png" and "cannot be read as an image" in lines[2]["error"]
    assert "1 files cannot be used; the others are predicted" in passed.stderr
    dtrain("predict", "runs/photos", "new", "--out", "out/all.csv", code=4)
    assert "new/text.png" in (photos.parent / "out" / "all.csv").read_text()
    (photos / "grey").mkdir()
    (photos / "dark" / "0.png").rename(photos / "grey" / "0.png")
    shown = dtrain("evaluate", "runs/photos", code=4).stderr
    assert "the data has the class 'grey'; the model was trained on dark, light" in shown


@pytest.mark.nightly
def test_the_score_of_a_text_is_that_of_its_tokens(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    dtrain("run", "decoder-tiny", *DECODER, "data.files=[a.txt]", "data.cache=cache", "name=small")
    (tmp_path / "same.txt").write_text("the quick brown fox")
    (tmp_path / "other.txt").write_text("#@!%" * 10)
    lines = [json.loads(line) for line in dtrain("predict", "runs/small", "same.txt", "other.txt").stdout.splitlines()]
    assert [line["tokens"] for line in lines] == [18, 39]
    assert lines[0]["loss"] < lines[1]["loss"]
    assert lines[0]["bits_per_byte"] == pytest.approx(lines[0]["loss"] / math.log(2), rel=1e-3)
    (tmp_path / "short.txt").write_text("a")
    assert "has 1 token; at least 2" in dtrain("predict", "runs/small", "short.txt", code=4).stderr


def test_a_training_split_of_text_is_evaluated_row_by_row() -> None:
    data = fresh("decoder", ["mesh={data: 1}"], 1).recipe.data
    drawn, cut = data.open("train"), opened_in_order(data, "train")
    assert drawn.random_starts
    assert cut.random_starts is None
    rows = cut.rows(np.array([0, 1, len(cut) - 1]))["token"]
    np.testing.assert_array_equal(rows[1], drawn.rows(np.array([16]))["token"][0])
    np.testing.assert_array_equal(rows[2], drawn.rows(np.array([16 * (len(cut) - 1)]))["token"][0])


def test_labels_follow_the_names_of_the_classes() -> None:
    class Named(Arrays):
        class_names = ("b", "c")

    source = Named(
        {"image": np.zeros((2, 4, 4, 1), np.uint8), "label": np.array([0, 1], np.int32)},
        image_example((4, 4, 1), 2),
        "",
    )
    relabelled = with_classes(source, ("a", "b", "c"))
    assert relabelled.rows(np.array([0, 1]))["label"].tolist() == [1, 2]
    assert relabelled.example["label"].values == 3
    assert with_classes(source, ()) is source
    with pytest.raises(DataError, match="the data has the class 'b'; the model was trained on c, d"):
        with_classes(source, ("c", "d"))


@pytest.mark.slow
def test_a_digit_from_a_file_is_the_digit_of_the_data(tmp_path: Path) -> None:
    loaded = fresh("mlp", ["mesh={data: 1}"], 1)
    source = loaded.recipe.data.open("test")
    image = source.rows(np.arange(3))["image"]
    for i, pixels in enumerate(image):
        Image.fromarray(np.rint(pixels[..., 0] * (255 / 16)).astype(np.uint8)).save(tmp_path / f"{i}.png")
    given = inputs(loaded.recipe.data, loaded.assembly.layout.example, [str(tmp_path)])
    np.testing.assert_array_equal(given.source.rows(np.arange(3))["image"], image)
    from_files, from_data = (
        list(predictions(loaded, given, 2)),
        list(predictions(loaded, Arrays(source.rows(np.arange(3)), source.example, ""), 2)),
    )
    assert [row["top"] for row in from_files] == [row["top"] for row in from_data]
    assert [row["file"] for row in from_files] == [str(tmp_path / f"{i}.png") for i in range(3)]
    assert {"row", "label"} <= from_data[0].keys()


class NoPredictions:
    """A model without `predict`."""

    def params(self) -> Any:
        from dtrain import Param

        return {"w": Param((64, 10), "_ _", jax.random.normal)}

    def loss(self, params: Any, batch: Any, ctx: Any) -> Any:
        from dtrain import layers

        return layers.classify(batch["image"].reshape(-1, 64) @ ctx.gather(params["w"]), batch, ctx)


class Flat(NoPredictions):
    """One whose predictions are not one row for each example."""

    def predict(self, params: Any, batch: Any, ctx: Any) -> Any:
        return {"mean": batch["image"].mean()}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoPredictions", r"has no predict\(params, batch, ctx\)"),
        ("Flat", r"returns 'mean' of shape \(\) for 16 examples"),
    ],
)
def test_a_model_that_predicts_nothing_is_refused(name: str, message: str) -> None:
    MODELS[name] = (
        EXAMPLES / "plain_jax.yaml",
        [*SMALL, f"model.target=tests.inference.test_predict:{name}", "model.args={}"],
    )
    loaded = fresh(name, ["mesh={data: 1}"], 1)
    with pytest.raises(RecipeError, match=message):
        predicted(loaded)
    if name == "NoPredictions":
        assert evaluate(loaded, loaded.recipe.data.open("test")).confusion is None


@pytest.mark.slow
def test_the_most_confident_mistakes_are_named_and_shown_with_their_pictures(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text(
        "model: mlp\ndata: digits\noptimizer: {kind: adamw, lr: 0.002}\nbatch: 64\nsteps: 40\n"
    )
    dtrain("run", "few.yaml")
    found = json.loads(dtrain("evaluate", "few", "--json").stdout)
    confusion, mistakes = np.array(found["confusion"]), found["mistakes"]
    assert len(mistakes) == min(16, confusion.sum() - confusion.trace())
    assert all(one["label"] != one["predicted"] for one in mistakes)
    assert [one["probability"] for one in mistakes] == sorted((one["probability"] for one in mistakes), reverse=True)
    rows = [json.loads(line) for line in dtrain("predict", "few", "--split", "test").stdout.splitlines()]
    wrong = sorted((row for row in rows if row["class"] != row["label"]), key=lambda row: -row["probability"])
    assert [one["example"] for one in mistakes] == [row["row"] for row in wrong[:16]]
    f1 = [found["f1_of_class"][name] for name in found["classes"]]
    right, counts, chosen = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    assert f1 == pytest.approx(2 * right / (counts + chosen))
    assert list(found["recall_of_class"].values()) == pytest.approx(right / counts)
    assert list(found["precision_of_class"].values()) == pytest.approx(right / np.maximum(chosen, 1))
    shown = dtrain("evaluate", "few").stdout
    assert f"example {mistakes[0]['example']}: {mistakes[0]['label']}, taken for {mistakes[0]['predicted']}" in shown
    dtrain("report", "few", "--html", "page.html")
    page = (tmp_path / "page.html").read_text()
    pictures = re.findall(r'<figure><img src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == len(mistakes)
    with Image.open(io.BytesIO(base64.b64decode(pictures[0]))) as picture:
        shown_HW = np.asarray(picture, np.float32)
    with np.load(digits.FILE) as file:
        order = np.random.default_rng(digits.SHUFFLE).permutation(len(file["label"]))
        drawn_HW = file["image"][order[mistakes[0]["example"]]].squeeze().astype(np.float32)
    assert np.allclose(shown_HW / shown_HW.max(), drawn_HW / drawn_HW.max(), atol=0.01)


def test_conversations_are_not_scored_as_texts(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text('{"text": "hello"}\n')
    chat = Chat(files=(str(tmp_path / "talk.jsonl"),), length=8, template="plain")
    with pytest.raises(DataError, match="`predict` scores texts, and these are records of conversations"):
        inputs(chat, row_example(8, packed=False), [str(tmp_path / "talk.jsonl")])
