"""A run as a user starts it, in a separate process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dtrain.track.jsonl import read
from tests.conftest import Dtrain, bare_environment
from tests.waiting import until

RECIPE = """
model: {kind: mlp, sizes: [64, 32, 10]}
data: {kind: digits, pixels: {crop: 1}}
optimizer: {kind: adamw, lr: 1e-3, decay: 0.1, ema: 0.9}
batch: 64
steps: 24
evaluate: {every: 12}
track: {every: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


def numbers(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without values that depend on the clock."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "rate/"))} for row in read(run / "metrics.jsonl")
    ]


def saved(run: Path, step: int) -> dict[str, bytes]:
    """All bits of a checkpoint."""
    place, here = run / "checkpoints" / str(step) / "state", jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as orbax:
        found = orbax.metadata(place).item_metadata.tree
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), found)
        state = orbax.restore(place, shapes)
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


@pytest.mark.slow
def test_a_run_folder_explains_itself(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    done = dtrain("run", recipe)
    run = tmp_path / "runs" / "small"
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["exit_code"], record["step"], record["steps"]) == ("finished", 0, 24, 24)
    assert set(record["seconds"]) == {
        *("start", "compile", "data", "dispatch", "device", "host", "evaluate", "save", "finish")
    }
    rows = read(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 25))
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [12, 24]
    assert "step 24/24" in (run / "log.txt").read_text()
    assert "eval   loss" in done.stdout
    assert "step 24/24" in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) < 45
    assert not done.stdout.startswith("step")

    again = dtrain("run", recipe)
    assert "already finished" in again.stderr
    assert dtrain("run", run / "recipe.yaml", "name=small").stderr == again.stderr


@pytest.mark.slow
def test_after_the_first_step_nothing_is_compiled_but_what_orbax_needs(dtrain: Dtrain, recipe: Path) -> None:
    """A save may have only half a minute, so its checksum is compiled before."""
    shown = dtrain("run", recipe, "evaluate.every=0", JAX_LOG_COMPILES="1").stderr
    before, _, after = shown.partition("step 1/24")
    compiled = "Finished XLA compilation of jit(_checked)"
    assert compiled in before
    assert compiled not in after


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize(
    "engine", ["jit", *(pytest.param(engine, marks=pytest.mark.nightly) for engine in ("shard_map", "pmap"))]
)
def test_stop_and_go_on_equals_never_stopped(dtrain: Dtrain, recipe: Path, tmp_path: Path, engine: str) -> None:
    options = [f"engine={engine}", "accumulate=2", *([] if engine == "jit" else ["--devices", "2"])]
    dtrain("run", recipe, "name=straight", *options)
    dtrain("run", recipe, "name=twice", "steps=10", *options)
    resumed = dtrain("run", recipe, "name=twice", *options)
    assert "resumed from step 10 (same recipe, code, software, devices and mesh: the same bits)" in resumed.stderr
    straight, twice = tmp_path / "runs" / "straight", tmp_path / "runs" / "twice"
    assert saved(straight, 24) == saved(twice, 24)
    assert [row for row in numbers(twice) if row["step"] > 10] == [row for row in numbers(straight) if row["step"] > 10]


def more_rows(run: "subprocess.Popen[str]", metrics: Path, count: int) -> None:
    """Wait until a run has written so many rows more, or has ended."""
    rows = len(read(metrics)) if metrics.exists() else 0
    until(lambda: run.poll() is not None or (metrics.exists() and len(read(metrics)) >= rows + count))


@pytest.mark.slow
def test_a_stopped_run_saves_and_resumes_to_the_same_bits(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    long = ["steps=2000", "evaluate.every=0"]
    dtrain("run", recipe, "name=straight", *long)
    command = [sys.executable, "-m", "dtrain", "run", str(recipe), "name=stopped", *long]
    for number in (signal.SIGINT, signal.SIGTERM):
        run = subprocess.Popen(command, cwd=tmp_path, env=bare_environment(), stderr=subprocess.PIPE, text=True)
        more_rows(run, tmp_path / "runs" / "stopped" / "metrics.jsonl", 6)
        run.send_signal(number)
        _, output = run.communicate(timeout=200)
        assert run.returncode == 75, output
        assert "saved" in output
        assert json.loads((tmp_path / "runs" / "stopped" / "run.json").read_text())["state"] == "stopped"
    dtrain("run", recipe, "name=stopped", *long)
    assert saved(tmp_path / "runs" / "straight", 2000) == saved(tmp_path / "runs" / "stopped", 2000)
    assert numbers(tmp_path / "runs" / "straight") == numbers(tmp_path / "runs" / "stopped")


@pytest.mark.nightly
def test_a_run_on_eight_devices_resumes_on_four(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    dtrain("run", recipe, "name=eight", "--devices", "8")
    dtrain("run", recipe, "name=four", "steps=10", "--devices", "8", "mesh={data: 2, fsdp: 2, tensor: 2}")
    resumed = dtrain("run", recipe, "name=four", "--devices", "4", "mesh={data: 1, fsdp: 4}")
    assert "the same numbers except for rounding:" in resumed.stderr
    assert "mesh tensor: was 2, now not set" in resumed.stderr
    eight, four = (
        [row for row in numbers(tmp_path / "runs" / name) if "train/loss" in row] for name in ("eight", "four")
    )
    for a, b in zip(eight, four, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7)


@pytest.mark.slow
@pytest.mark.newest
def test_two_processes_train_as_one(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    dtrain("run", recipe, "name=one", "--devices", "4", "mesh.fsdp=2")
    done = dtrain("run", recipe, "name=two", "--devices", "4", "--processes", "2", "mesh.fsdp=2", "engine=shard_map")
    assert "in 2 processes" in done.stderr
    assert "Gloo" not in done.stdout
    for a, b in zip(numbers(tmp_path / "runs" / "one"), numbers(tmp_path / "runs" / "two"), strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jit", pytest.param("shard_map", marks=pytest.mark.nightly)])
def test_many_independent_gathers_between_processes_keep_their_order(
    dtrain: Dtrain, tmp_path: Path, engine: str
) -> None:
    """Of sizes for which XLA:CPU starts several at once; gloo pairs them by their order alone."""
    sizes = ["model.vocab=2048", "steps=8", "optimizer.schedule=constant", "evaluate.every=0", f"engine={engine}"]
    start = ["run", "decoder-tiny", *sizes, "mesh={data: 1, fsdp: 2}", "--devices", "2"]
    dtrain(*start, "--processes", "2", "--restarts", "0", "name=two")
    dtrain(*start, "name=one")
    for a, b in zip(numbers(tmp_path / "runs" / "one"), numbers(tmp_path / "runs" / "two"), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


@pytest.mark.nightly
def test_pmap_on_several_processes_equals_one_and_resumes_with_the_same_bits(
    dtrain: Dtrain, recipe: Path, tmp_path: Path
) -> None:
    run = ["run", recipe, "--devices", "4", "engine=pmap", "accumulate=2", "guard.not_finite=skip"]
    for processes in (1, 2, 4):
        dtrain(*run, "--processes", processes, f"name=p{processes}")
    dtrain(*run, "--processes", "2", "name=twice", "steps=10")
    resumed = dtrain(*run, "--processes", "2", "name=twice").stderr
    assert "resumed from step 10 (same recipe, code, software, devices and mesh: the same bits)" in resumed
    one, two, four, twice = (tmp_path / "runs" / name for name in ("p1", "p2", "p4", "twice"))
    assert saved(twice, 24) == saved(two, 24)
    assert [row for row in numbers(twice) if row["step"] > 10] == [row for row in numbers(two) if row["step"] > 10]
    for several in (two, four):
        for a, b in zip(numbers(one), numbers(several), strict=True):
            assert a == pytest.approx(b, rel=1e-6, abs=1e-7)


@pytest.mark.slow
def test_a_worker_that_fails_takes_the_others_along(dtrain: Dtrain, recipe: Path) -> None:
    start = time.monotonic()
    failed = dtrain("run", recipe, "--processes", "2", "optimizer={kind: adamw, lr: 1e4, decay: 0.9}", code=7)
    assert "ended first: exit code 7" in failed.stderr
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_a_changed_recipe_is_refused_and_nothing_is_lost(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    dtrain("run", recipe)
    run = tmp_path / "runs" / "small"
    counted = run / "usage.json"  # the time of all starts
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path != counted}
    refused = dtrain("run", recipe, "optimizer.lr=2e-3", "batch=32", code=2)
    assert "batch: was 64, now 32" in refused.stderr
    assert "optimizer.lr: was 0.001, now 0.002" in refused.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path != counted} == before


@pytest.mark.slow
def test_what_does_not_bear_on_the_numbers_may_change(dtrain: Dtrain, recipe: Path) -> None:
    dtrain("run", recipe, "steps=10")
    dtrain("run", recipe, "track.every=5", "data.load.prefetch=0", "checkpoint.every=7")


@pytest.mark.slow
def test_a_run_that_is_not_finite_saves_none_of_it(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    failed = dtrain(
        "run",
        recipe,
        "optimizer={kind: adamw, lr: 1e4, decay: 0.9}",
        "checkpoint.every=1",
        "track.every=100",
        code=7,
    )
    assert "at step" in failed.stderr
    run = tmp_path / "runs" / "small"
    assert json.loads((run / "run.json").read_text())["exit_code"] == 7
    for step in (path for path in (run / "checkpoints").iterdir() if path.name.isdigit()):
        assert all(np.isfinite(np.frombuffer(bits, np.float32)).all() for bits in saved(run, int(step.name)).values())


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    dtrain: Dtrain, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    refused = dtrain("run", recipe, "--runs-dir", tmp_path / "file" / "runs", code=3)
    assert "cannot write to the run folder" in refused.stderr
    assert "hint: choose another folder with --runs-dir" in refused.stderr


def test_a_dry_run_tries_everything_and_keeps_nothing(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    done = dtrain("run", recipe, "--dry-run", "mesh={data: 2, fsdp: 2, tensor: 2}")
    assert "mesh data 2 x fsdp 2 x tensor 2" in done.stderr
    assert "equal bit for bit" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_newest_and_the_best_are_kept(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    dtrain("run", recipe, "evaluate.every=4", "checkpoint={every: 4, keep: 1, best: eval/loss}", "optimizer.lr=0.3")
    run = tmp_path / "runs" / "small"
    losses = {row["step"]: row["eval/loss"] for row in read(run / "metrics.jsonl") if "eval/loss" in row}
    kept = {int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()}
    assert kept == {24, min(losses, key=lambda step: losses[step])}


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_the_machine_is_refused_with_the_arithmetic(dtrain: Dtrain, recipe: Path) -> None:
    refused = dtrain("run", recipe, "mesh={data: 3, tensor: 2}", "--devices", "8", code=2)
    assert "data 3 x tensor 2: 6 != 8 devices" in refused.stderr
    here = dtrain("run", recipe, "mesh={data: 2}", code=2)
    assert "2 != 1 devices" in here.stderr


@pytest.mark.slow
def test_an_option_that_the_compiler_does_not_know_is_named(dtrain: Dtrain, recipe: Path) -> None:
    refused = dtrain("run", recipe, "engine.xla={xla_no_such_thing: true}", code=2)
    assert "engine.xla.xla_no_such_thing: this compiler has no such option" in refused.stderr
    dtrain("run", recipe, "engine.xla={xla_tpu_scoped_vmem_limit_kib: 65536}")


@pytest.mark.slow
def test_an_address_is_no_folder(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    refused = dtrain("run", recipe, "--runs-dir", "gs://bucket/runs", code=3)
    assert "must be a local path, not a URL (gs://)" in refused.stderr
    assert not (tmp_path / "gs:").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), [("train", 1), ("test", 0)])  # in a batch, at a save
def test_a_data_file_that_is_cut_during_a_run_ends_it_with_its_name(tmp_path: Path, name: str, workers: int) -> None:
    for file in ("train", "test"):
        (tmp_path / f"{file}.bin").write_bytes(np.zeros(200_000, np.uint16).tobytes())
    (tmp_path / "cut.yaml").write_text(
        "model: {kind: decoder, vocab: 16, context: 16, layers: 1, width: 8, heads: 1}\n"
        f"data: {{kind: tokens, files: [train.bin], test_files: [test.bin], length: 9, load: {{workers: {workers}}}}}\n"
        "checkpoint: {every: 100}\n"
        "evaluate: {every: 0}\n"
        "optimizer: {kind: sgd, lr: 1e-3}\n"
        "batch: 8\n"
        "steps: 1000000\n"
        "track: {every: 1}\n"
    )
    run = tmp_path / "runs" / "cut"
    command = [sys.executable, "-m", "dtrain", "run", "cut.yaml"]
    environment = bare_environment() | {"HOME": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        metrics = run / "metrics.jsonl"
        until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text()))
        os.truncate(tmp_path / f"{name}.bin", 4096)
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 4, stderr
    assert f"{name}.bin: had 400,000 bytes when it was opened, now 4,096" in stderr
    assert "Traceback" not in stderr
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("failed", 4)


@pytest.mark.nightly
def test_norms_on_a_mesh_add_up_to_that_of_the_gradient_and_change_nothing(dtrain: Dtrain, tmp_path: Path) -> None:
    mesh = ("engine=shard_map", "--devices", "4", "mesh={fsdp: 2, tensor: 2}", "optimizer.schedule=constant")
    words = ("run", "decoder-tiny", "steps=6", "track.every=3", "evaluate.every=0", *mesh)
    dtrain(*words, "track.norms=true", "name=with", seconds=250)
    dtrain(*words, "name=without", seconds=250)
    rows, plain = (
        [row for row in read(tmp_path / "runs" / name / "metrics.jsonl") if "train/loss" in row]
        for name in ("with", "without")
    )
    assert [row["train/loss"] for row in rows] == pytest.approx([row["train/loss"] for row in plain], rel=1e-6)
    for row in rows:
        squares = [value**2 for name, value in row.items() if name.startswith("norm/grad/")]
        assert sum(squares) ** 0.5 == pytest.approx(row["train/grad_norm"], rel=1e-4)
        assert row["norm/update/blocks.out.weight/1"] > 0
    assert not any(name.startswith("norm/") for row in plain for name in row)


@pytest.mark.slow
def test_a_run_that_is_past_the_end_of_its_recipe_is_refused(dtrain: Dtrain, recipe: Path) -> None:
    dtrain("run", recipe, "optimizer.schedule={kind: constant}")
    refused = dtrain("run", recipe, "optimizer.schedule={kind: constant}", "steps=10", code=2).stderr
    assert "has saved step 24, and this recipe ends at step 10" in refused
    assert "train longer, for example with steps=34" in refused
