"""Predictions of a run do not depend on what its files, or its code, became after it was trained."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.conftest import Dtrain

ROWS = "u,kind,y\n"


def table(path: Path, count: int, extra: str = "") -> None:
    random = np.random.default_rng(0)
    lines = [
        f"{u:.3f},{kind},{3 * u + (kind == 'a'):.3f}"
        for u, kind in zip(random.normal(5, 2, count), random.choice(["a", "b"], count), strict=True)
    ]
    path.write_text(ROWS + "\n".join(lines) + "\n" + extra)


TABLE = (
    "name: t\nmodel: {kind: mlp, hidden: [8]}\n"
    "data: {kind: table, files: [train.csv], label: y, predict: number, missing: median, test: 0.2}\n"
    "optimizer: {kind: adamw, lr: 1e-2}\nbatch: 32\nsteps: 20\n"
)


@pytest.mark.nightly
def test_a_table_is_scaled_as_the_run_was_whatever_its_file_became(dtrain: Dtrain, tmp_path: Path) -> None:
    table(tmp_path / "train.csv", 200)
    (tmp_path / "new.csv").write_text("u,kind\n4.5,a\n5.5,b\n,b\n")
    (tmp_path / "t.yaml").write_text(TABLE)
    dtrain("run", "t.yaml")
    before = dtrain("predict", "t", "new.csv").stdout
    assert len(before.splitlines()) == 3
    measured = dtrain("evaluate", "t").stdout
    for change in ("600.0,a,1800.0\n" * 300, "1.0,new,3.0\n" * 50, ""):
        table(tmp_path / "train.csv", 200 if change else 60, change)
        assert dtrain("predict", "t", "new.csv").stdout == before
        changed = dtrain("evaluate", "t")
        assert "are not those of the run" in changed.stderr
    (tmp_path / "train.csv").unlink()
    assert dtrain("predict", "t", "new.csv").stdout == before
    dtrain("export", "t", "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", framework="numpy") as weights:
        kept = json.loads(weights.metadata()["fitted"])
    assert (kept["columns"], kept["categories"]) == (["u", "kind"], {"kind": ["a", "b"]})
    assert kept["scaling"]["mean"][0] == pytest.approx(5, abs=0.5)
    table(tmp_path / "train.csv", 200)
    again = dtrain("evaluate", "t")
    assert again.stdout == measured
    assert "are not those" not in again.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_arrays_are_scaled_as_the_run_was(dtrain: Dtrain, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 300)
    x = random.normal(size=(300, 3)) * [1, 1000, 1] + y[:, None] * [3, 0, 0]
    np.savez(tmp_path / "a.npz", x=x, y=y)
    done = dtrain("new", "a.npz", "--run")
    assert "scale: true" in (tmp_path / "a.yaml").read_text()
    result = json.loads(dtrain("report", "a", "--json").stdout)
    assert result["last"]["eval/accuracy"] > 0.85, done.stderr
    np.savez(tmp_path / "new.npz", x=x[:5])
    before = dtrain("predict", "a", "new.npz").stdout
    np.savez(tmp_path / "a.npz", x=10 * x, y=y)
    assert dtrain("predict", "a", "new.npz").stdout == before
    assert "data.scale: true makes all of them 1" in dtrain("check", "a.yaml", "data.scale=false").stderr


NET = """
from dataclasses import dataclass
import jax
from dtrain.models.nn.layers import classify, dense, linear

@dataclass(frozen=True)
class Net:
    def params(self):
        return {"out": dense(64, 10, "embed classes")}

    def loss(self, params, batch, ctx):
        x = jax.nn.relu(batch["image"].reshape(len(batch["image"]), -1))
        return classify(linear(ctx.gather(params["out"]), x), batch, ctx)
"""


@pytest.mark.slow
def test_code_that_was_changed_after_a_run_is_named(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "n.yaml").write_text(
        "name: n\nmodel: {kind: custom, target: 'net:Net'}\ndata: {kind: digits}\n"
        "optimizer: {kind: adamw, lr: 1e-2}\nbatch: 64\nsteps: 20\n"
    )
    dtrain("run", "n.yaml")
    assert "was changed" not in dtrain("evaluate", "n").stderr
    (tmp_path / "net.py").write_text(NET.replace("relu", "tanh"))
    line = "warning: net.py was changed since this checkpoint was saved (was "
    assert line in dtrain("evaluate", "n").stderr
    assert "net.py" in dtrain("replay", "n", "--at", "3").stdout
