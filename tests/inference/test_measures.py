"""Measures: what a user's object or dtrain computes at evaluations from the outputs for all examples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.models.measures import classification, regression
from tests.conftest import Dtrain

MODULE = """
import os
import pathlib
import signal

import numpy as np

import dtrain


class Second:
    metrics = (dtrain.Metric("second", higher_is_better=False, unit="%"), dtrain.Metric("rows", None))

    def __init__(self, fails=(), name="second"):
        self.fails, self.name = fails, name

    def __call__(self, step, rows):
        if step in self.fails:
            raise ValueError("the second choice")
        hits = [np.argsort(-outputs["probability"], 1)[:, 1] == data["label"] for data, outputs in rows]
        return {self.name: np.concatenate(hits).mean(), "rows": len(np.concatenate(hits))}


class Interrupts(Second):
    def __call__(self, step, rows):
        rows, marker = iter(rows), pathlib.Path("asked")
        next(rows)
        if step == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__call__(step, rows)


class Impatient(Second):
    def __call__(self, step, rows):
        next(iter(rows))
        return {"second": step, "rows": float("nan")}
"""
RECIPE = """
model: {kind: mlp, sizes: [64, 32, 10]}
data: digits
optimizer: {kind: adamw, lr: 0.01}
batch: 64
steps: 4
evaluate: {every: 2, batch: 48, measures: [classification, {kind: custom, target: second:Second}]}
checkpoint: {every: 2, best: eval/second}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "second.py").write_text(MODULE)
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


def evaluations(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval/loss" in line]


def test_the_metrics_of_a_classifier_are_those_of_scikit_learn() -> None:
    random = np.random.RandomState(0)
    logit_NC, label_N = random.randn(200, 7), random.randint(0, 6, 200)  # class 6 has no example
    logit_NC[np.arange(200), label_N] += 1.5
    untied_NC = np.exp(logit_NC) / np.exp(logit_NC).sum(1, keepdims=True)
    probability_NC = np.round(untied_NC, 2)  # with ties
    probability_NC[:, 0] += 1 - probability_NC.sum(1)
    found = classification(label_N, probability_NC)
    # scikit-learn: precision_recall_fscore_support(average="macro", labels=range(6)), and the mean of
    # roc_auc_score(label == c, probability[:, c]) over the six classes; below top_k_accuracy_score(k=5)
    expected = {
        "precision": 0.5377366231638544,
        "recall": 0.5073264712583598,
        "f1": 0.520895658211746,
        "auc": 0.8480504958935375,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert classification(label_N, untied_NC)["top5_accuracy"] == pytest.approx(0.96)
    # three examples with confidence 0.9 of which two are right, one right with 0.6: (3 x |0.9 - 2/3| + 0.4) / 4
    sure = np.array([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.6, 0.4]])
    found = classification(np.array([0, 0, 0, 0]), sure)
    assert found["calibration_error"] == pytest.approx((3 * (0.9 - 2 / 3) + 0.4) / 4)
    assert "auc" not in found  # there is one class


def test_the_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    # the examples of sklearn.metrics.r2_score and root_mean_squared_error in its documentation
    found = regression(np.array([3, -0.5, 2, 7]), np.array([2.5, 0, 2, 8]))
    assert found == pytest.approx({"r2": 0.9486081370449679, "rmse": 0.6123724356957945}, abs=1e-12)
    several = np.array([[0.5, 1], [-1, 1], [7, -6]]), np.array([[0, 2], [-1, 2], [8, -5]])
    assert regression(*several) == pytest.approx({"r2": 0.9368005266622779, "rmse": 0.8227486121839513}, abs=1e-12)
    assert regression(np.ones(3), np.arange(3)).keys() == {"rmse"}  # no differences that could be explained


@pytest.mark.slow
def test_numbers_of_a_table_are_measured_in_their_unit(dtrain: Dtrain, tmp_path: Path) -> None:
    rows = "".join(f"{n},{n % 7},{1e4 + 30 * n + 200 * (n % 7)}\n" for n in range(300))
    (tmp_path / "t.csv").write_text("a,b,price\n" + rows)
    dtrain("new", "t.csv")
    assert "measures: [regression]" in (tmp_path / "t.yaml").read_text()
    dtrain("run", "t.yaml", "epochs=20")
    result = json.loads(dtrain("evaluate", "t", "--json").stdout)["metrics"]
    lines = [json.loads(line) for line in dtrain("predict", "t", "--split", "test").stdout.splitlines()]
    label, value = (np.array([line[name] for line in lines]) for name in ("label", "value"))
    expected = regression(label, value)
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert result["r2"] > 0.9


@pytest.mark.slow
def test_measures_are_the_same_on_every_mesh_and_change_no_bit_of_the_run(
    dtrain: Dtrain, tmp_path: Path, recipe: Path
) -> None:
    dtrain("run", recipe, "name=off", "evaluate.measures=[]", "checkpoint.best=null")
    done = dtrain("run", recipe, "name=on")
    assert "f1 " in done.stderr and "second " in done.stderr
    mesh = ("mesh={data: 2, fsdp: 2}", "engine=shard_map", "--devices", "4")
    dtrain("run", recipe, "name=mesh", *mesh)
    off, on, other = (evaluations(tmp_path, name) for name in ("off", "on", "mesh"))
    assert [line["eval/loss"] for line in off] == [line["eval/loss"] for line in on]
    assert len(on) == 2 and on[-1]["eval/rows"] == 360  # the 24 rows of padding in the last batch are left out
    for one, same in zip(on, other, strict=True):
        for name in ("precision", "recall", "f1", "top5_accuracy", "auc", "calibration_error", "second"):
            assert one[f"eval/{name}"] == pytest.approx(same[f"eval/{name}"], abs=1e-5), name
    dtrain("predict", "on", "--top", "10", "--out", "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    second = np.mean([list(row["top"])[1] == row["label"] for row in rows])
    assert on[-1]["eval/second"] == pytest.approx(second)

    shown = dtrain("evaluate", "on", "evaluate.measures=[classification]", "checkpoint.best=null", "--json").stdout
    assert json.loads(shown)["metrics"]["f1"] == pytest.approx(on[-1]["eval/f1"])
    best = min(on, key=lambda line: line["eval/second"])["step"]
    assert f"step {best}, the best of 2 checkpoints by eval/second" in dtrain("evaluate", "on", "--best").stderr


@pytest.mark.slow
def test_a_measure_of_the_first_examples_at_some_evaluations(dtrain: Dtrain, tmp_path: Path, recipe: Path) -> None:
    measures = "[{kind: custom, target: 'second:Second', every: 4, examples: 100}]"
    dtrain("run", recipe, "steps=6", f"evaluate.measures={measures}")
    assert [line.get("eval/rows") for line in evaluations(tmp_path, "r")] == [None, 100, 100]


@pytest.mark.slow
def test_a_measure_that_fails_is_reported_and_the_run_goes_on(dtrain: Dtrain, tmp_path: Path, recipe: Path) -> None:
    measures = "[{kind: custom, target: 'second:Second', args: {fails: [2]}}]"
    done = dtrain("run", recipe, f"evaluate.measures={measures}")
    assert "no eval/second, eval/rows at step 2: " in done.stderr
    assert "second.py:19: ValueError: the second choice" in done.stderr
    assert ["eval/second" in line for line in evaluations(tmp_path, "r")] == [False, True]
    refused = dtrain(
        "run", recipe, "--dry-run", "name=dry", "evaluate.every=1", f"evaluate.measures={measures}", code=2
    )
    assert "second.py:19: ValueError" in refused.stderr
    wrong = "[{kind: custom, target: 'second:Second', args: {name: third}}]"
    done = dtrain("run", recipe, "name=wrong", f"evaluate.measures={wrong}")
    assert "returns 'third'; its `metrics` declare ['second', 'rows']" in done.stderr


@pytest.mark.slow
def test_two_processes_get_the_values_of_the_first(dtrain: Dtrain, tmp_path: Path, recipe: Path) -> None:
    measures = "evaluate.measures=[classification, {kind: custom, target: 'second:Impatient'}]"
    # the best value decides about a save, in which all processes take part
    best = ("checkpoint.best=eval/second", "checkpoint.every=0")
    dtrain("run", recipe, "name=one", measures, *best)
    dtrain("run", recipe, "name=two", measures, *best, "--processes", "2", "mesh={data: 2}", seconds=100)
    one, two = (evaluations(tmp_path, name) for name in ("one", "two"))
    assert [line["eval/second"] for line in two] == [2, 4]  # an iterator that is left early holds no process back
    assert "eval/rows" not in two[0]  # what is not finite is left out
    assert one[-1]["eval/f1"] == pytest.approx(two[-1]["eval/f1"], abs=1e-5)


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_abandons_a_measure_and_makes_it_at_the_next_start(
    dtrain: Dtrain, tmp_path: Path, recipe: Path
) -> None:
    measures = "evaluate.measures=[{kind: custom, target: 'second:Interrupts'}]"
    done = dtrain("run", recipe, measures, code=75)
    assert "saved at step 2 of 4" in done.stderr and not evaluations(tmp_path, "r")
    dtrain("run", recipe, measures)
    dtrain("run", recipe, "name=straight")
    own, straight = (evaluations(tmp_path, name) for name in ("r", "straight"))
    assert [line["step"] for line in own] == [2, 4]
    assert [line["eval/loss"] for line in own] == [line["eval/loss"] for line in straight]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluate.measures=[classification, classification]"], "two metrics are called precision"),
        (["evaluate.measures=[{kind: custom, target: 'second:None_'}]"], "has no attribute 'None_'"),
        (["evaluate.measures=[{kind: custom, target: 'numpy:array', args: {object: 1}}]"], "without __call__"),
        (["evaluate.measures=[{kind: custom, target: 'numpy:poly1d', args: {c_or_r: [1]}}]"], "not a tuple of dtrain"),
        (["checkpoint.best=eval/third"], "checkpoint.best: eval/third is not measured"),
        (["checkpoint.best=eval/rows"], "it is not known whether a higher or a lower eval/rows is better"),
        (["stop={metric: eval/third}"], "stop.metric: eval/third is not measured"),
    ],
)
@pytest.mark.slow
def test_measures_that_cannot_be_made_are_refused_before_the_first_step(
    dtrain: Dtrain, recipe: Path, overrides: list[str], message: str
) -> None:
    assert message in dtrain("run", recipe, "checkpoint.best=null", *overrides, code=2).stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluate.measures=[clasification]"], "did you mean 'classification'?"),
        (["evaluate.measures=[{kind: custom, target: second}]"], "not of the form package.module:name"),
        (["evaluate.measures=[{kind: classification, evry: 2}]"], "evaluate.measures.0.evry: unknown key"),
        (["evaluate.measures=[{kind: classification, every: 3}]"], "3 is no multiple of evaluate.every = 2"),
        (["checkpoint.best=f1"], "checkpoint.best: no metric 'f1'"),
        (["stop={metric: f1}"], "stop.metric: no metric 'f1'"),
        (["stop={}", "evaluate.every=0"], "there is no evaluation by which stop could decide"),
        (["optimizer.schedule=plateau", "evaluate.every=0"], "by which optimizer.schedule could decide"),
    ],
)
def test_mistakes_are_found_by_check(in_process: Dtrain, recipe: Path, overrides: list[str], message: str) -> None:
    assert message in in_process("check", recipe, *overrides, code=2).stderr


def test_what_check_says_of_measures(in_process: Dtrain, recipe: Path) -> None:
    done = in_process("check", recipe)
    assert "the measure second:Second, whose module is imported only when the run starts" in done.stdout + done.stderr
    refused = in_process("check", "decoder-tiny", "evaluate.measures=classification", code=2).stderr
    assert "a model of kind decoder predicts no classes" in refused
    refused = in_process("check", "mlp-digits", "evaluate.measures=regression", code=2).stderr
    assert "a model of kind mlp predicts no numbers here" in refused
    measures = "evaluate.measures={kind: custom, target: 'second:Second', of: samples}"
    assert "draws no samples" in in_process("check", "decoder-tiny", measures, code=2).stderr
