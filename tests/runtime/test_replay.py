"""`dtrain replay`: a step again, with the bits of the run, the loss of each example and the first norm out of range."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dtrain.checkpoint import manifest
from dtrain.runtime.replay import outliers
from tests.conftest import Dtrain

SMALL = ("mlp-digits", "epochs=null", "steps=24", "batch=16", "optimizer.schedule=constant", "checkpoint.every=8")
KEPT = ("checkpoint.keep=9", "evaluate.every=0")


def replayed(dtrain: Dtrain, *words: str, **more: Any) -> dict[str, Any]:
    return json.loads(dtrain("replay", *words, "--json", **more).stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        pytest.param((), marks=pytest.mark.nightly),
        ("--devices", "4", "engine=shard_map", "mesh={data: 2, fsdp: 2}"),
        pytest.param(("--devices", "2", "engine=pmap"), marks=pytest.mark.nightly),
    ],
)
def test_a_step_again_has_the_bits_of_the_run_and_its_examples(
    dtrain: Dtrain, tmp_path: Path, place: tuple[str, ...]
) -> None:
    dtrain("run", *SMALL, *KEPT, "track={every: 1, norms: true}", "name=own", *place)
    lines = (tmp_path / "runs/own/metrics.jsonl").read_text().splitlines()
    logged = {row["step"]: row for row in map(json.loads, lines)}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    for step, start in ((22, 8), (7, 0)):
        found = replayed(dtrain, "own", "--at", str(step), "--before", "10")
        assert (found["start"], found["compared"], found["largest"]) == (start, step - start, 0)
        assert found["values"]["loss"] == logged[step]["train/loss"]
        assert found["values"]["grad_norm"] == logged[step]["train/grad_norm"]
        assert [found["losses"][key] for key in found["losses"]] == [
            logged[int(key)]["train/loss"] for key in found["losses"]
        ]
        losses = [example["loss"] for example in found["examples"]]
        assert losses == sorted(losses, reverse=True) and len(losses) == 16
        assert np.mean(losses) == pytest.approx(found["values"]["loss"], rel=1e-5)  # each is one part of it
        seen = json.loads(dtrain("data", "seen", "own", "--at", str(step), "--json").stdout)
        assert sorted(row for one in found["examples"] for row in one["rows"]) == sorted(one["row"] for one in seen)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}  # nothing is written
    assert "23" in dtrain("replay", "own", "--at", "23").stdout
    metrics = tmp_path / "runs/own/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(str(logged[7]["train/loss"]), "0.5"))
    assert "why is not known: what dtrain records" in dtrain("replay", "own", "--at", "7").stdout
    saved = tmp_path / "runs/own/checkpoints/8"
    older = manifest.read(saved)
    versions = older.conditions["versions"] | {"jax": "0.9.9"}
    replace(older, conditions=older.conditions | {"versions": versions}).write(saved)
    told = dtrain("replay", "own", "--at", "7").stdout
    assert f"jax: was 0.9.9, now {jax.__version__}" in told and "why is not known" not in told
    assert "compared with the oldest checkpoint, of step 8:" in told
    (saved / manifest.NAME).write_text("{")
    assert "are the same is not known; checkpoint 8: its manifest" in dtrain("replay", "own", "--at", "7").stdout
    shutil.rmtree(saved.parent)
    assert "the run has no checkpoint: whether" in dtrain("replay", "own", "--at", "7").stdout
    assert "the run has 24 steps" in dtrain("replay", "own", "--at", "25", code=2).stderr
    assert "no rollback repeated step 7" in dtrain("replay", "own", "--at", "7", "--abandoned", code=2).stderr


@pytest.mark.slow
def test_steps_that_the_run_made_in_one_call_may_differ_by_rounding(dtrain: Dtrain) -> None:
    dtrain("run", *SMALL, *KEPT, "name=own", "engine.steps_per_call=4")
    said = ["the same numbers except for rounding:", "  engine.steps_per_call: was 4, now 1"]
    assert replayed(dtrain, "own", "--at", "20", "--before", "4")["guarantee"] == said
    assert replayed(dtrain, "own", "--at", "4")["guarantee"][1:] == said


@pytest.mark.slow
@pytest.mark.nightly
def test_it_begins_with_what_an_imported_run_began_with_or_with_the_oldest_checkpoint(
    dtrain: Dtrain, tmp_path: Path
) -> None:
    dtrain("run", *SMALL, *KEPT, "name=first")
    dtrain("export", "first", "first.safetensors")
    dtrain("import", "mlp-digits", "first.safetensors", *SMALL[1:], *KEPT, "name=second", "track.every=1")
    dtrain("run", *SMALL, *KEPT, "name=second", "track.every=1")
    found = replayed(dtrain, "second", "--at", "6")
    assert (found["start"], found["compared"], found["largest"]) == (0, 6, 0)
    for step in (0, 8):
        shutil.rmtree(tmp_path / f"runs/second/checkpoints/{step}")
    assert replayed(dtrain, "second", "--at", "20")["start"] == 16  # fewer steps before it, and not the initial state


NET = """
import jax, jax.numpy as jnp
from dtrain import layers


class Net:
    loss_of = layers.classify

    def init(self, key, example):
        return {"out": jax.random.normal(key, (8, 2)) * 0.1}

    def outputs(self, params, batch, ctx):
        return jnp.log(1.0 + batch["x"]) @ params["out"]
"""


@pytest.mark.slow
def test_a_row_that_makes_nan_is_named_with_the_operation(dtrain: Dtrain, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x, label = draw.random((400, 8), np.float32), np.arange(400) % 2
    x[7, 3] = -2.0  # its logarithm is no number
    np.savez(tmp_path / "rows.npz", x=x, label=label)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "net.yaml").write_text(
        "model: {kind: custom, target: 'net:Net'}\ndata: {kind: npz, file: rows.npz, test: 0.2}\n"
        "optimizer: {kind: sgd, lr: 0.01}\nbatch: 16\nepochs: 3\ncheckpoint: {every: 4, keep: 9}\n"
        "evaluate: {every: 0}\nguard: {contract: false}\nseed: 3\n"
    )
    failed = dtrain("run", "net.yaml", code=7)
    step = int(failed.stderr.partition("nan at step ")[2].split()[0].rstrip(":;"))
    found = replayed(dtrain, "net", "--at", str(step))
    assert found["step"] <= step  # the run looks at the loss of logged steps alone
    step = found["step"]
    index = int(np.flatnonzero(~np.isfinite([one["loss"] for one in found["examples"]]))[0])
    assert index == 0
    assert "rows.npz: row 8, label 1" in found["examples"][0]["text"]
    assert "nan comes from `log`" in found["found"][0] and "net.py" in found["found"][0]

    done = dtrain("run", "net.yaml", "guard.not_finite=rollback", "name=rolled")
    assert "rolling back" in done.stderr
    again = replayed(dtrain, "rolled", "--at", str(step))
    assert math.isfinite(again["values"]["loss"])
    thrown = replayed(dtrain, "rolled", "--at", str(step), "--abandoned")
    assert not math.isfinite(thrown["values"]["loss"])
    assert thrown["examples"][0]["rows"] == found["examples"][0]["rows"]


def test_norms_out_of_the_range_are_in_the_order_of_steps_and_of_how_far_they_are() -> None:
    norms = {step: {"a": 1.0 + step / 100, "b": 1.0, "c": 5.0} for step in range(1, 10)}
    norms[8] |= {"b": 2.5}
    norms[9] |= {"a": 40.0, "b": 100.0, "c": math.nan}
    found = outliers(norms)
    assert [(one.step, one.name) for one in found] == [(8, "b"), (9, "c"), (9, "a")]
    assert found[0].text == "step 8: b 2.5, before 1 to 1"
    assert outliers({step: {"a": 10.0**step} for step in range(1, 6)}) == []  # too few before to tell
