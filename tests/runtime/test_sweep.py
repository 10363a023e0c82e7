import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.core.errors import RecipeError
from dtrain.core.run_dir import NAME, Folder
from dtrain.data.data_check import DataCheck
from dtrain.data.digits import Digits
from dtrain.data.source import Load
from dtrain.recipe import examine
from dtrain.runtime.sweep import Range, devices_of, gpus, parse
from tests.conftest import Dtrain, bare_environment
from tests.waiting import until

SHORT = ("epochs=3", "optimizer.schedule.warmup=5", "evaluate.every=0", "track.every=10")


def names(*words: str, trials: int | None = None, seed: int = 0) -> list[str]:
    return [trial.name for trial in parse("r.yaml", words, trials, seed).trials()]


def test_a_grid_has_every_combination_named_by_its_values() -> None:
    assert names("optimizer.lr=1e-4,1e-3", "seed=0,1", "batch=8") == [
        "lr-1e-4-seed-0", "lr-1e-4-seed-1", "lr-1e-3-seed-0", "lr-1e-3-seed-1",
    ]  # fmt: skip
    sweep = parse("r.yaml", ["optimizer.lr=1e-4,1e-3", "batch=8"], None, 0)
    assert sweep.fixed == ("batch=8",)
    assert sweep.trials()[1].overrides == ["optimizer.lr=1e-3"]


def test_commas_in_brackets_and_quotes_do_not_separate_values() -> None:
    sweep = parse(
        "r.yaml", ["model.sizes=[64, 10],[64, 32, 10]", "data.root='a,b'", "mesh={fsdp: 2, data: 2}"], None, 0
    )
    assert sweep.axes == {"model.sizes": ("[64, 10]", "[64, 32, 10]")}
    assert len(sweep.fixed) == 2


def test_random_values_are_drawn_in_their_range_and_the_same_again() -> None:
    words = ["optimizer.lr=log:1e-5..1e-2", "model.layers=int:2..8", "x=0.1..0.9", "batch=8,16"]
    sweep = parse("r.yaml", words, 300, 3)
    drawn = [trial.values for trial in sweep.trials()]
    assert drawn == [trial.values for trial in parse("r.yaml", words, 300, 3).trials()]
    assert drawn != [trial.values for trial in parse("r.yaml", words, 300, 4).trials()]
    rates = [float(values["optimizer.lr"]) for values in drawn]
    assert 1e-5 <= min(rates) < 3e-5
    assert 5e-3 < max(rates) <= 1e-2
    assert sum(rate < math.sqrt(1e-5 * 1e-2) for rate in rates) == pytest.approx(150, abs=40)  # half below the middle
    assert {values["model.layers"] for values in drawn} == set("2345678")
    assert all(0.1 <= float(values["x"]) <= 0.9 for values in drawn)
    assert len({trial.name for trial in sweep.trials()}) == 300
    assert all(NAME.fullmatch(trial.name) for trial in sweep.trials())


def test_fewer_combinations_than_trials_are_all_there_are() -> None:
    assert sorted(names("a=1,2", "b=1,2", trials=50)) == ["a-1-b-1", "a-1-b-2", "a-2-b-1", "a-2-b-2"]


def test_long_and_equal_names_are_told_apart() -> None:
    long = names(f"x={'a' * 90}1,{'a' * 90}2", "y=1.0,1+0")
    assert len(set(long)) == 4
    assert all(NAME.fullmatch(name) for name in long)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=1"], "no key has several values"),
        (["a=1..2"], "a range has no end"),
        (["a=2..1"], "the first bound must be the lower one"),
        (["a=log:0..1"], "must begin above 0"),
        (["a=int:1.5..3"], "must be whole numbers"),
        (["a=lg:1..3"], "lg: is not a kind of range"),
        (["a=1e..2"], "not numbers"),
        ([f"{key}={','.join(map(str, range(30)))}" for key in "abc"], "27,000 combinations"),
        (["a=1e-3,x,0.001"], "1e-3 and 0.001, which are the same"),
        (["a=relu,gelu,relu"], "has relu twice"),
        (["optimizer.lr=1,2", "name=c3"], "a sweep names its runs by their values"),
    ],
)
def test_what_is_no_sweep_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse("r.yaml", words, None, 0).trials()
    assert str(Range(1.0, 2.0, "int:")) == "int:1.0..2.0"


def test_gpus_are_divided_among_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA H100"; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus() == ["0", "1", "2", "3"]
    assert [devices_of(job, 2, gpus()) for job in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert devices_of(0, 1, gpus()) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert devices_of(0, 2, []) == {}


def test_every_recipe_of_a_sweep_is_checked_with_its_data_before_the_first_run(
    in_process: Dtrain, tmp_path: Path
) -> None:
    words = ("sweep", "mlp-digits", "optimizer.lr=1e-3,1e-2", "epochs=3,1")
    refused = in_process(*words, code=2).stderr
    assert "optimizer.lr=1e-3 epochs=1:" in refused
    assert "50 warm-up steps in a run of 23 steps" in refused
    missing = ("data.kind=text", "data.files=[none.txt]", "data.length=8")
    assert "no file of text" in in_process("sweep", "decoder-tiny", "seed=0,1", *missing, code=4).stderr
    assert not (tmp_path / "runs").exists()


def test_equal_data_is_inspected_once_for_the_recipes_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    monkeypatch.setattr(examine, "inspect_data", lambda data: (looked.append(data), DataCheck(rows=3))[1])
    inspect = examine.inspect_once()
    first = inspect(Digits())
    first.notes.append("of the first")
    assert inspect(Digits()).notes == []
    assert inspect(Digits(load=Load(workers=1))).rows == 3
    assert len(looked) == 2


@pytest.mark.slow
def test_a_sweep_ranks_its_runs_and_resumes(dtrain: Dtrain, tmp_path: Path) -> None:
    often = [word.replace("evaluate.every=0", "evaluate.every=20") for word in SHORT]
    words = ("sweep", "mlp-digits", "optimizer.lr=1e-4,1e-2", *often, "--name", "two", "--jobs", "2")
    done = dtrain(*words, seconds=250)
    assert "lr-1e-4 starts; what it prints: runs/two/lr-1e-4.out" in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["optimizer.lr", "1e-2", "1e-4"]  # the better one first
    for name, line in zip(("lr-1e-2", "lr-1e-4"), done.stdout.splitlines()[1:], strict=True):
        best = json.loads(dtrain("report", f"two/{name}", "--json").stdout)["best"]["eval/accuracy"]
        assert f"{best['value']:.2%} at {best['step']}" in line
    assert (tmp_path / "runs" / "two" / "sweep.png").stat().st_size > 10_000
    before = Folder(tmp_path / "runs" / "two" / "lr-1e-2").read_record()
    again = json.loads(dtrain(*words, "--json", seconds=250).stdout)
    assert [row["optimizer.lr"] for row in again] == ["1e-2", "1e-4"]
    assert Folder(tmp_path / "runs" / "two" / "lr-1e-2").read_record() == before  # it was not trained again
    assert "another sweep" in dtrain(*words, "batch=32", code=2).stderr
    by_loss = dtrain(*words, "--metric", "loss", seconds=250).stdout.splitlines()
    assert [line.split()[1] for line in by_loss[1:]] == ["loss", "loss"]
    assert "has no metric train/speed" in dtrain(*words, "--metric", "train/speed", code=2, seconds=250).stderr


def test_a_metric_that_the_runs_do_not_measure_is_refused_first(in_process: Dtrain, tmp_path: Path) -> None:
    done = in_process("sweep", "mlp-digits", "optimizer.lr=1e-4,1e-2", "--metric", "eval/acuracy", code=2)
    assert "--metric eval/acuracy: the runs do not measure it" in done.stderr
    assert "one of eval/accuracy, eval/loss" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.nightly
def test_runs_that_diverge_are_a_result_and_others_an_error(dtrain: Dtrain) -> None:
    done = dtrain("sweep", "mlp-digits", "optimizer.kind=sgd", "optimizer.lr=1e-2,1e4", *SHORT, seconds=250)
    assert "exit code 7" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("1e4")
    assert "failed" in done.stdout.splitlines()[-1]
    mistaken = dtrain("sweep", "mlp-digits", "optimizer.lrr=1,2", code=2).stderr
    assert "optimizer.lrr=1" in mistaken
    assert "did you mean 'lr'" in mistaken


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_the_running_ones(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "dtrain", "sweep", "mlp-digits", "optimizer.lr=1e-4,1e-3", "epochs=20000"]
    running = subprocess.Popen(
        command, cwd=tmp_path, env=bare_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "runs" / "mlp-digits-sweep" / "lr-1e-4" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size)
    running.send_signal(number)
    _, stderr = running.communicate(timeout=200)
    assert running.returncode == 75, stderr
    assert "0 of 2 runs are done" in stderr
    record = Folder(metrics.parent).read_record()
    assert record["state"] == "stopped"
    assert record["step"] > 0
