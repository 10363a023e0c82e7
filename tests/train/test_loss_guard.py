"""The effects of one batch of real data whose loss is not finite, or spikes."""

import json
from pathlib import Path

import numpy as np
import pytest

from dtrain.checkpoint import manifest
from dtrain.data.digits import Digits
from dtrain.data.order import Order
from dtrain.track.jsonl import read
from tests.conftest import Dtrain
from tests.train.test_run import saved

MODEL = """
import jax.numpy as jnp
from dtrain.models.mlp import MLP

class Broken:
    def __init__(self, labels, factor):
        self.mlp = MLP(sizes=(64, 32, 10))
        self.labels, self.factor = jnp.array(labels), float(factor)
        self.params, self.mismatch = self.mlp.params, self.mlp.mismatch

    def loss(self, params, batch, ctx):
        found = self.mlp.loss(params, batch, ctx)
        bad = (batch["label"][: len(self.labels)] == self.labels).all()
        return found._replace(sum=jnp.where(bad, self.factor, 1.0) * found.sum)
"""
RECIPE = """
model: {{kind: custom, target: "broken:Broken", args: {{labels: {labels}, factor: {factor}}}}}
data: {{kind: digits, pixels: {{crop: 0}}}}
optimizer: {{kind: adamw, lr: 1e-3}}
batch: 64
steps: 48
track: {{every: 1}}
checkpoint: {{every: 8, keep: 9}}
guard: {{{guard}}}
"""
BAD = 29
"""The batch that gives a loss that is not finite, counted from 0."""


def recipe(folder: Path, factor: str, guard: str) -> Path:
    source = Digits().open("train")
    rows = Order(len(source), 0, source.random_starts)(np.arange(BAD * 64, BAD * 64 + 16))
    labels = [int(label) for label in source.rows(rows)["label"]]
    (folder / "broken.py").write_text(MODEL)
    path = folder / "watched.yaml"
    path.write_text(RECIPE.format(labels=labels, factor=factor, guard=guard))
    return path


def steps(run: Path) -> list[int]:
    return [row["step"] for row in read(run / "metrics.jsonl") if "train/loss" in row]


@pytest.mark.slow
def test_it_stops_and_keeps_what_was_before(dtrain: Dtrain, tmp_path: Path) -> None:
    failed = dtrain("run", recipe(tmp_path, ".nan", "not_finite: stop"), code=7)
    assert f"loss is nan at step {BAD + 1}" in failed.stderr
    run = tmp_path / "runs" / "watched"
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()) == [8, 16, 24]


@pytest.mark.slow
def test_an_update_is_left_out_and_no_other(dtrain: Dtrain, tmp_path: Path) -> None:
    path = recipe(tmp_path, ".nan", "not_finite: skip")
    dtrain("run", path)
    run = tmp_path / "runs" / "watched"
    assert steps(run) == [step for step in range(1, 49) if step != BAD + 1]
    dtrain("run", path, f"steps={BAD}", "name=before")
    dtrain("run", path, f"steps={BAD + 1}", "name=after")
    before, after = (saved(tmp_path / "runs" / name, n) for name, n in (("before", BAD), ("after", BAD + 1)))
    assert {key for key in before if before[key] != after[key]} == {"['step']"}


@pytest.mark.slow
def test_leaving_out_has_a_budget(dtrain: Dtrain, tmp_path: Path) -> None:
    failed = dtrain("run", recipe(tmp_path, ".nan", "not_finite: skip, budget: 0"), code=7)
    assert "0 updates were skipped before it" in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "guard"),
    [(".nan", "not_finite: rollback"), pytest.param("1e4", "spike: 20", marks=pytest.mark.nightly)],
)
def test_a_rollback_skips_the_batches(dtrain: Dtrain, tmp_path: Path, factor: str, guard: str) -> None:
    """And a restart after that goes over them too, to the same bits."""
    path = recipe(tmp_path, factor, guard)
    done = dtrain("run", path)
    assert "rolling back to the newest checkpoint" in done.stderr
    assert (
        "resumed from step 24 (same recipe, code, software, devices and mesh: the same bits; 6 batches skipped)"
        in done.stderr
    )
    run = tmp_path / "runs" / "watched"
    assert steps(run) == list(range(1, 49))
    values = manifest.read(run / "checkpoints" / "48").conditions
    assert values["batches_skipped"] == 6
    dtrain("run", path, "name=twice", code=-9, DTRAIN_FAULT="kill@step:44")
    again = dtrain("run", path, "name=twice")
    assert "6 batches skipped" in again.stderr
    assert saved(tmp_path / "runs" / "twice", 48) == saved(run, 48)


@pytest.mark.slow
def test_going_back_has_a_budget(dtrain: Dtrain, tmp_path: Path) -> None:
    failed = dtrain(
        "run",
        recipe(tmp_path, "1", "not_finite: rollback, budget: 2"),
        "optimizer={kind: adamw, lr: 1e4, decay: 0.9}",
        code=7,
    )
    assert "the run was rolled back 2 times before" in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "guard"), [(".nan", "not_finite: rollback"), ("1e4", "spike: 20")])
def test_it_goes_back_from_a_step_that_would_be_copied(dtrain: Dtrain, tmp_path: Path, factor: str, guard: str) -> None:
    memory = f"checkpoint.memory={{every: {BAD + 1}, folder: {tmp_path}/memory}}"
    done = dtrain("run", recipe(tmp_path, factor, guard), memory, "evaluate.every=7")
    assert "rolling back to the newest checkpoint" in done.stderr
    values = manifest.read(tmp_path / "runs" / "watched" / "checkpoints" / "48").conditions
    assert values["batches_skipped"] == BAD + 1 - 24  # from the checkpoint of step 24, not from a copy


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "guard"), [(".nan", "not_finite: rollback"), ("1e4", "spike: 20")])
def test_it_goes_back_from_a_step_that_would_be_saved(dtrain: Dtrain, tmp_path: Path, factor: str, guard: str) -> None:
    done = dtrain("run", recipe(tmp_path, factor, guard), f"checkpoint.every={BAD + 1}", "evaluate.every=5")
    assert "rolling back to the newest checkpoint" in done.stderr
    values = manifest.read(tmp_path / "runs" / "watched" / "checkpoints" / "48").conditions
    assert values["batches_skipped"] == BAD + 1
    assert json.loads((tmp_path / "runs" / "watched" / "run.json").read_text())["lost"]["recomputed_s"] > 0


@pytest.mark.slow
def test_what_was_left_out_before_a_restart_counts(dtrain: Dtrain, tmp_path: Path) -> None:
    path = recipe(tmp_path, ".nan", "not_finite: skip, budget: 1")
    dtrain("run", path, code=-9, DTRAIN_FAULT="kill@step:44")
    dtrain("run", path)
    values = manifest.read(tmp_path / "runs" / "watched" / "checkpoints" / "48").conditions
    assert values["guard_state"]["skipped"] == 1
