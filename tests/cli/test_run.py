import json
from pathlib import Path

import pytest

from dtrain.cli.run import with_length
from dtrain.core.run_dir import Folder
from dtrain.track.jsonl import read
from tests.conftest import Dtrain

SHORT = (
    "run",
    "mlp-digits",
    "epochs=1",
    "optimizer.schedule.warmup=5",
    "track.every=1",
    "evaluate.every=0",
    "name=short",
)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "a", "--extend", "5steps", "x=1"],
        ["run", "a", "epochs=2", "--extend=5steps", "x=1"],
        ["run", "a", "x=1"],
    ],
)
def test_started_processes_get_the_length_in_place_of_the_option(words: list[str]) -> None:
    assert with_length(words, 29) == ["run", "a", "x=1", "steps=29"]


@pytest.mark.slow
def test_a_finished_run_is_extended_and_the_jump_of_the_learning_rate_told(dtrain: Dtrain, tmp_path: Path) -> None:
    dtrain(*SHORT)
    done = dtrain(*SHORT, "--extend", "1epoch", "--devices", "1")
    assert "extended to 45 steps" in done.stderr  # ceil(2 x 1437 / 64)
    assert "learning rate: was" in done.stderr
    place = Folder(tmp_path / "runs" / "short")
    record = place.read_record()
    assert (record["state"], record["step"], record["steps"]) == ("finished", 45, 45)
    assert record["changes"] == [
        {"step": 23, "recipe": ["epochs: was 1, now not set", "steps: was not set, now 45"], "length": [None, 1]},
    ]
    assert "is already finished" in dtrain(*SHORT).stderr
    assert [row["step"] for row in read(place.metrics) if "train/loss" in row] == list(range(1, 46))
    assert "changed at step 23: epochs" in done.stdout

    other = dtrain(*SHORT, "--extend", "5steps", "optimizer.lr=1", code=2).stderr
    assert "optimizer.lr: was 0.003, now 1" in other
    assert "epochs:" not in other
    assert json.loads(dtrain("report", "short", "--json").stdout)["step"] == 45  # nothing is lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--extend", "5"], "write for example 500steps"),
        (["--extend", "0steps"], "not a length"),
        (["--extend", "5steps"], "train it first"),
        (["--extend", "5steps", "--dry-run"], "cannot be combined"),
    ],
)
def test_lengths_that_mean_nothing_are_refused(dtrain: Dtrain, words: list[str], message: str) -> None:
    assert message in dtrain("run", "mlp-digits", *words, code=2).stderr


def test_a_run_that_has_not_finished_is_resumed_first(in_process: Dtrain, tmp_path: Path) -> None:
    place = Folder(tmp_path / "runs" / "mlp-digits")
    place.prepare()
    place.write_record({"state": "stopped", "step": 5, "steps": 45, "name": "mlp-digits"})
    refused = in_process("run", "mlp-digits", "--extend", "5steps", code=2).stderr
    assert "is at step 5 of 45" in refused
    assert "resumes with steps=45" in refused
