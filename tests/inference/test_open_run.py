"""A run in Python: opened, or trained and opened."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dtrain
from dtrain.core.errors import CheckpointError, DataError, RecipeError
from tests.conftest import Dtrain
from tests.inference.test_samples import MODEL

RECIPE = """
model: {kind: mlp, sizes: [64, 16, 10]}
data: digits
optimizer: {kind: adamw, lr: 0.001}
batch: 64
steps: 6
evaluate: {every: 2, measures: classification}
checkpoint: {every: 2, best: eval/loss}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def dtrain_cli(dtrain: Dtrain) -> Dtrain:
    """The command line, beside the package of that name."""
    return dtrain


@pytest.mark.slow
@pytest.mark.newest
def test_a_run_is_trained_opened_and_asked(here: Path, dtrain_cli: Dtrain) -> None:
    run = dtrain.run("r.yaml", "runs", overrides=["name=mine"])
    assert (run.path, run.step, run.record["state"]) == (Path("runs/mine"), 6, "finished")
    again = dtrain.run("r.yaml", "runs", overrides=["name=mine"])  # it is finished: opened
    rows = run.data().rows(np.arange(7))
    whole, some = run.predict()["probability"], again.predict({"image": rows["image"]})["probability"]
    assert whole.shape == (360, 10)
    np.testing.assert_array_equal(some, whole[:7])
    np.testing.assert_array_equal(run.predict(examples=7)["probability"], whole[:7])
    assert run.predict(split="train", examples=3)["probability"].shape == (3, 10)
    found = run.evaluate()
    assert found["accuracy"] == (whole.argmax(1) == run.data().rows(np.arange(360))["label"]).mean()
    assert run.metrics["eval/f1"][-1] == pytest.approx(found["f1"], abs=1e-6)
    assert run.metrics["step"].tolist()[-1] == 6 and np.isnan(run.metrics["train/loss"][-1])
    assert run.params["layer0"]["weight"].shape == (64, 16)
    best = dtrain.open("mine", "best")
    name, steps = "eval/loss", run.metrics["step"]
    assert best.step == steps[np.nanargmin(run.metrics[name])]
    assert dtrain.open("runs/mine", 4).step == 4
    eight = dtrain.open("mine", overrides=["mesh={data: 2, fsdp: 4}"])
    assert len(jax.tree.leaves(eight.params)[0].sharding.device_set) == 8
    np.testing.assert_allclose(eight.predict()["probability"], whole, atol=1e-6)

    dtrain_cli("predict", "mine", "--split", "train", "--out", "codes.npz", "--keep", "label")
    with np.load(here / "codes.npz") as codes:
        assert codes["probability"].shape == (1437, 10)
        np.testing.assert_array_equal(codes["label"], run.data("train").rows(np.arange(1437))["label"])
    second = "{kind: npz, file: codes.npz, names: {probability: features}}"  # the input of a second stage
    dtrain_cli("run", "r.yaml", "name=second", f"data={second}", "model.sizes=[10, 10]")
    assert "has no 'lable'" in dtrain_cli("predict", "mine", "--out", "x.npz", "--keep", "lable", code=2).stderr
    assert "--keep goes with" in dtrain_cli("predict", "mine", "--keep", "label", code=2).stderr
    assert (
        "--split train goes without files" in dtrain_cli("predict", "mine", "x.png", "--split", "train", code=2).stderr
    )
    assert "--top 2 goes with lines" in dtrain_cli("predict", "mine", "--out", "x.npz", "--top", "2", code=2).stderr
    rows_of = dtrain_cli("predict", "mine", "--split", "train").stdout.splitlines()
    assert len(rows_of) == 1437 and json.loads(rows_of[0])["row"] == 0

    wrong: list[tuple[Any, str]] = [
        ({"picture": rows["image"]}, "expected arrays by name, of image, label; found 'picture'"),
        ({}, "found nothing"),
        ({"image": rows["image"][0]}, r"image is uint8 \(examples, 8, 8, 1\) .* found the shape \(8, 8, 1\)"),
        ({"image": rows["image"] + 0.5}, "found float64 with other values"),
        ({"image": rows["image"], "label": [1]}, "different numbers of rows"),
        ({"label": [10]}, "label has values from 10 to 10"),
    ]
    for arrays, message in wrong:
        with pytest.raises(DataError, match=message):
            run.predict(arrays)


@pytest.mark.slow
def test_samples_of_an_open_run_are_those_of_its_evaluations(here: Path) -> None:
    (here / "painter.py").write_text(MODEL)
    override = ["name=paints", "model={kind: custom, target: 'painter:Painter'}", "evaluate.measures=[]"]
    run = dtrain.run("r.yaml", overrides=[*override, "evaluate.samples=10"])
    drawn = run.sample(examples=10)
    assert drawn["digit"].shape == (10, 8, 8, 1) and drawn["noise"].dtype == np.float32
    lines = (here / "runs" / "paints" / "samples" / "00000006-samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["label"] for line in lines] == drawn["label"].tolist()
    assert (run.sample(examples=10, seed=3)["digit"] != drawn["digit"]).any()
    own = run.sample({"label": [1, 2], "image": np.zeros((2, 8, 8, 1), np.uint8)})
    assert own["digit"].shape == (2, 8, 8, 1)


@pytest.mark.slow
def test_a_decoder_continues_texts_in_python(here: Path) -> None:
    (here / "t.txt").write_text("the cat sat on the mat. " * 200)
    (here / "d.yaml").write_text(
        "model: {kind: decoder, vocab: 256, context: 16, layers: 1, width: 16, heads: 2}\n"
        "data: {kind: text, files: t.txt, length: 16}\noptimizer: {kind: adamw, lr: 0.01}\nbatch: 8\nsteps: 5\n"
    )
    run = dtrain.run("d.yaml")
    texts = run.generate(["the", "a cat"], tokens=5, temperature=0)
    assert len(texts) == 2 and texts == run.generate(["the", "a cat"], tokens=5, temperature=0)
    assert run.generate("the", tokens=5, temperature=0) == texts[:1]
    rows = run.data().rows(np.arange(3))
    rows["target"][:, :4] = -1  # where no token is predicted
    assert run.predict(rows)["tokens"].tolist() == [12, 12, 12]
    with pytest.raises(DataError, match="examples = 0"):
        run.predict(examples=0)
    with pytest.raises(RecipeError, match="overrides go with a file or a name"):
        dtrain.run(run.recipe, overrides=["steps=3"])


def test_what_cannot_be_opened(here: Path) -> None:
    with pytest.raises(RecipeError, match="nothing"):
        dtrain.open("nothing")
    (here / "runs" / "r").mkdir(parents=True)
    (here / "runs" / "r" / "recipe.yaml").write_text(RECIPE)
    with pytest.raises((CheckpointError, RecipeError)):
        _ = dtrain.open("runs/r").params
