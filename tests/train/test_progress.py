"""Decisions by metrics of evaluations: to stop early, and to lower the learning rate."""

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.core.metrics import Watch
from dtrain.core.run_dir import Folder
from dtrain.train.progress import Improvement
from tests.conftest import Dtrain

RECIPE = """
model: {kind: mlp, sizes: [64, 16, 10]}
data: digits
optimizer:
  kind: sgd
  lr: 0.1
  schedule: {kind: plateau, warmup: 1, metric: eval/accuracy, min_delta: 100, patience: 2, factor: 0.5, final: 0.2}
batch: 64
steps: 40
evaluate: {every: 2}
stop: {patience: 6, min_delta: 100}
checkpoint: {every: 5}
track: {every: 1}
"""
"""No evaluation after the first is an improvement: the rate falls at steps 6, 10 and 14, where the run stops."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


def lines(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    """The metrics without times."""
    found = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [{key: x for key, x in line.items() if key.startswith(("step", "train/", "eval/"))} for line in found]


def rates(tmp_path: Path, name: str) -> dict[int, float]:
    return {line["step"]: line["train/lr"] for line in lines(tmp_path, name) if "train/lr" in line}


def record(tmp_path: Path, name: str) -> dict[str, Any]:
    return json.loads((tmp_path / "runs" / name / "run.json").read_text())


def test_an_improvement_is_larger_than_min_delta_in_the_better_direction() -> None:
    falls = Improvement(Watch(patience=2, min_delta=0.1), rising=False)
    for step, value in enumerate([1.0, 0.95, 0.85, 0.9, 0.7501], 1):
        falls.note(step, value)
    assert (falls.best, falls.at, falls.since, falls.stalled) == (0.85, 3, 2, True)
    falls.note(6, 0.7)
    assert (falls.best, falls.at, falls.stalled) == (0.7, 6, False)
    rises = Improvement(Watch(patience=1), rising=True)
    rises.note(1, 0.5)
    rises.note(2, 0.5)
    assert rises.stalled
    other = Improvement(Watch(metric="eval/f1"), rising=True)
    other.recall(rises.plain)
    assert other.best is None  # of another metric
    again = Improvement(Watch(patience=1), rising=True)
    again.recall(json.loads(json.dumps(rises.plain)))
    assert again.plain == rises.plain


@pytest.mark.slow
def test_the_run_stops_and_lowers_its_rate(dtrain: Dtrain, tmp_path: Path, recipe: Path) -> None:
    done = dtrain("run", recipe)
    assert "stopped early: eval/loss has not improved on" in done.stderr and "of step 2 in 6 evaluations" in done.stderr
    assert "step 6: eval/accuracy has not improved" in done.stderr
    found = rates(tmp_path, "r")
    expected = {1: 0.05} | {step: 0.1 * (1 if step < 7 else 0.5 if step < 11 else 0.25) for step in range(2, 15)}
    assert found == pytest.approx(expected)
    assert record(tmp_path, "r")["state"] == "finished" and record(tmp_path, "r")["step"] == 14
    report = dtrain("report", "r").stdout
    assert "stopped early: eval/loss" in report and "(14 steps, 0.624 epochs" in report

    again = dtrain("run", recipe)
    assert "already finished" in again.stderr and "stop.patience" in again.stderr
    dtrain("run", recipe, "stop.patience=8")  # two evaluations more, with the rate as low as it may become
    assert record(tmp_path, "r")["step"] == 18 and rates(tmp_path, "r")[18] == pytest.approx(0.02)
    dtrain("run", recipe, "stop=null", "steps=20")
    assert record(tmp_path, "r")["step"] == 20 and "early" not in record(tmp_path, "r")


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({"kill@step:9": -9}, marks=pytest.mark.nightly),
        pytest.param({"kill@step:13": -9}, marks=pytest.mark.nightly),
        pytest.param({"term@step:6": 75}, marks=pytest.mark.nightly),
        # an evaluation that was skipped, made at the next start, which is killed before it saves what that decided
        {"term@step:5": 75, "kill@step:8": -9},
    ],
)
def test_a_resumed_run_decides_the_same(dtrain: Dtrain, tmp_path: Path, recipe: Path, faults: dict[str, int]) -> None:
    dtrain("run", recipe)
    for fault, code in faults.items():
        dtrain("run", recipe, "name=again", DTRAIN_FAULT=fault, code=code)
    dtrain("run", recipe, "name=again")
    again = lines(tmp_path, "again")
    if len(faults) > 1:  # the evaluation that was made twice is there twice, with the same values
        again = [line for before, line in zip([{}, *again], again, strict=False) if line != before]
    assert again == lines(tmp_path, "r")


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        "shard_map",
        *(pytest.param(engine, marks=pytest.mark.nightly) for engine in ("pmap", "{kind: jit, steps_per_call: 3}")),
    ],
)
def test_every_engine_decides_alike(dtrain: Dtrain, tmp_path: Path, recipe: Path, engine: str) -> None:
    dtrain("run", recipe, f"engine={engine}", "mesh={data: 4}", "--devices", "4")
    expected = {1: 0.05} | {step: 0.1 * (1 if step < 7 else 0.5 if step < 11 else 0.25) for step in range(2, 15)}
    assert rates(tmp_path, "r") == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_kill_after_the_early_stop_was_saved_changes_nothing(dtrain: Dtrain, tmp_path: Path, recipe: Path) -> None:
    dtrain("run", recipe)
    place = Folder(tmp_path / "runs" / "r")
    values = place.read_record()
    del values["early"]
    place.write_record(values | {"state": "running"})
    done = dtrain("run", recipe)
    assert "stopped early" in done.stderr and record(tmp_path, "r")["step"] == 14
    assert "schedule" in dtrain("run", recipe, "name=r", "optimizer.schedule.factor=0.3", code=2).stderr


@pytest.mark.nightly
def test_other_evaluations_are_no_longer_the_same_bits_if_they_decide(dtrain: Dtrain, recipe: Path) -> None:
    dtrain("run", recipe, "stop=null", DTRAIN_FAULT="term@step:9", code=75)
    changed = dtrain("run", recipe, "stop=null", "steps=12", "evaluate.every=3").stderr
    assert "evaluate.every: was 2, now 3" in changed and "the same bits" not in changed
    plain = recipe.with_name("plain.yaml")
    plain.write_text("".join(line for line in RECIPE.splitlines(keepends=True) if "schedule" not in line))
    dtrain("run", plain, "stop=null", DTRAIN_FAULT="term@step:9", code=75)
    assert "the same bits" in dtrain("run", plain, "stop=null", "evaluate.every=3").stderr
