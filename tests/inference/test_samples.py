"""What a model draws at evaluations, and after its run."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dtrain.core.errors import DataError
from dtrain.inference.samples import side_by_side, write_samples
from tests.conftest import Dtrain

MODEL = """
import jax
import jax.numpy as jnp

from dtrain import Loss, layers


class Painter:
    def params(self):
        return {"out": layers.dense(64, 64, "embed hidden")}

    def loss(self, params, batch, ctx):
        x = batch["image"].reshape(len(batch["image"]), -1)
        error = ((layers.linear(ctx.gather(params["out"]), x) - x) ** 2).mean(1)
        weight = batch.get("weight", jnp.ones(len(x)))
        return Loss((error * weight).sum(), weight.sum(), {})

    def sample(self, params, batch, ctx):
        noise = jax.vmap(lambda key: jax.random.normal(key, (64,)))(ctx.keys(batch, "start"))
        drawn = layers.linear(ctx.gather(params["out"]), noise)
        pixels = jnp.clip(128 + 40 * drawn, 0, 255).astype(jnp.uint8).reshape(-1, 8, 8, 1)
        return {"digit": pixels, "label": batch["label"], "noise": jnp.tile(noise, (1, 5)).astype(jnp.bfloat16)}


class Seen:
    def __init__(self, run):
        self.path = run.folder.path / "seen.txt"

    def log(self, step, values):
        pass

    def pictures(self, step, grids):
        with self.path.open("a") as file:
            file.write(f"{step} {[(name, grid.shape) for name, grid in grids.items()]}\\n")
"""
RECIPE = """
model: {kind: custom, target: painter:Painter}
data: {kind: digits}
optimizer: {kind: sgd, lr: 0.01}
batch: 16
steps: 4
evaluate: {every: 2, batch: 8}
track: {to: [{kind: custom, target: painter:Seen}]}
"""


def drawn(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.mark.slow
def test_samples_are_drawn_at_each_evaluation_alike_on_every_mesh(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "painter.py").write_text(MODEL)
    (tmp_path / "r.yaml").write_text(RECIPE)
    dtrain("run", "r.yaml", "name=off")
    done = dtrain("run", "r.yaml", "name=on", "evaluate.samples=10")
    assert "dtrain sample on" in done.stderr
    mesh = ("mesh={data: 2, fsdp: 2}", "engine=shard_map", "--devices", "4")
    dtrain("run", "r.yaml", "name=mesh", "evaluate.samples=10", *mesh)
    folder = tmp_path / "runs" / "on" / "samples"
    names = {f"{step:08}-{name}" for step in (2, 4) for name in ("digit.png", "samples.jsonl", "samples.npz")}
    assert {path.name for path in folder.iterdir()} == names
    for name in ("00000002-digit.png", "00000004-digit.png"):
        other = drawn(tmp_path / "runs" / "mesh" / "samples" / name).astype(int)
        assert drawn(folder / name).shape == (18, 78, 3)  # ten of 8 x 8, eight in a row, with gaps
        assert np.abs(drawn(folder / name) - other).max() <= 1
    labels = [json.loads(line) for line in (folder / "00000004-samples.jsonl").read_text().splitlines()]
    assert len(labels) == 10 and labels[0].keys() == {"label"}
    noise = np.load(folder / "00000004-samples.npz")["noise"]
    assert noise.shape == (10, 320) and noise.dtype == np.float32 and 0.9 < noise.std() < 1.1
    seen = (tmp_path / "runs" / "on" / "seen.txt").read_text().splitlines()
    assert seen == [f"{step} [('digit', (18, 78, 3))]" for step in (2, 4)]
    metrics = [(tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines() for name in ("off", "on")]
    losses = [[{k: v for k, v in json.loads(x).items() if "loss" in k} for x in lines] for lines in metrics]
    assert losses[0] == losses[1]  # the same bits as without samples

    dtrain("sample", "on", "--count", "10", "--out", "again")
    np.testing.assert_array_equal(drawn(tmp_path / "again" / "digit.png"), drawn(folder / "00000004-digit.png"))
    dtrain("sample", "on", "--count", "10", "--out", "others", "--seed", "5")
    assert (drawn(tmp_path / "others" / "digit.png") != drawn(tmp_path / "again" / "digit.png")).any()
    dtrain("sample", "on", "--step", "4", "--split", "train", "--out", "train")
    page = dtrain("report", "on", "--html", "page.html")
    assert "page.html" in page.stderr
    assert (tmp_path / "page.html").read_text().count('<img data-step="') == 2


def test_a_model_that_draws_nothing_is_refused_before_the_first_step(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "painter.py").write_text(MODEL.replace("def sample(", "def other("))
    (tmp_path / "r.yaml").write_text(RECIPE)
    refused = dtrain("run", "r.yaml", "evaluate.samples=4", code=2).stderr
    assert "the model of kind custom draws no samples" in refused
    assert "sample(params, batch, ctx)" in refused
    refused = dtrain("check", "decoder-tiny", "evaluate.samples=4", code=2).stderr
    assert "evaluate.samples" in refused and "evaluate.questions" in refused


def test_pictures_stand_side_by_side_and_numbers_are_finite(tmp_path: Path) -> None:
    pictures = np.arange(9, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 3, 1), np.uint8)
    grid = side_by_side(pictures)
    assert grid.shape == (6, 38, 3)
    assert grid[0, 5, 0] == 1 and grid[4, 0, 0] == 8 and grid[4, 5, 0] == 255 and grid[2, 0, 0] == 255
    with pytest.raises(DataError, match="'x' have values that are not finite"):
        write_samples({"x": np.array([1.0, np.nan])}, tmp_path, "")
