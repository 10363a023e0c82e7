import json
import math
from pathlib import Path

import pytest

from dtrain.core.errors import RecipeError
from dtrain.core.run_dir import Folder
from dtrain.track.summary import summarise
from tests.conftest import Dtrain


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    place = Folder(tmp_path / "trial")
    place.prepare()
    seconds = {"start": 0.09, "compile": 1.0, "data": 0.5, "dispatch": 1.0, "device": 2.0, "evaluate": 0.2, "save": 0.1}
    times = {"seconds": seconds, "started": 100.0, "ended": 105.0, "lost": {"pause_s": 0.1}}
    about = {"name": "trial", "state": "finished", "step": 30, "steps": 30}
    about |= {"data": {"kind": "digits", "train": 300, "test": 60, "epochs": 2.5}}
    place.write_record(about | times | {"higher_is_better": {"accuracy": True}, "units": {"accuracy": "%"}})
    rows = [
        {"step": step, "train/loss": 3 / step, "time/step_ms": ms, "rate/examples_per_s": 64e3 / ms}
        for step, ms in ((10, 50.0), (20, 4.0), (30, 5.0))
    ]
    rows += [{"step": 15, "eval/loss": 0.5, "eval/accuracy": 0.9}, {"step": 30, "eval/loss": 0.7, "eval/accuracy": 0.8}]
    place.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_the_summary_golden(run: Folder, golden: object, tmp_path: Path) -> None:
    golden("summary.txt", summarise(run).text().replace(f"{tmp_path}/", "") + "\n")  # pyright: ignore[reportCallIssue]


def test_the_numbers_are_those_of_the_record(run: Folder) -> None:
    found = summarise(run).values
    assert found["last"] == {"train/loss": 0.1, "eval/loss": 0.7, "eval/accuracy": 0.8}
    assert found["best"]["eval/loss"] == {"value": 0.5, "step": 15}
    assert found["steps_per_s"] == pytest.approx(200)


def test_a_run_whose_process_is_dead_was_killed(run: Folder) -> None:
    run.write_record(run.read_record() | {"state": "running"})
    assert summarise(run).values["state"] == "killed"
    assert summarise(run).text().startswith("trial: killed at step 30 of 30\n")


def test_the_best_follows_what_the_model_declares_and_nothing_is_guessed(run: Folder) -> None:
    rows = [{"step": n, "eval/top1": x, "eval/other": x} for n, x in enumerate([0.069, 0.191, math.nan, 0.212, 0.205])]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.write_record(run.read_record() | {"higher_is_better": {"top1": True}, "units": {"top1": "%"}})
    assert summarise(run).values["best"] == {"eval/top1": {"value": 0.212, "step": 3}}
    assert "top1 21.20% at 3" in summarise(run).text()


def test_the_named_times_add_up_to_the_wall_time_without_pauses(run: Folder) -> None:
    values = summarise(run).values
    assert values["wall"] == pytest.approx(4.9)
    assert sum(values["parts"].values()) == pytest.approx(4.9, rel=0.02)
    run.write_record(run.read_record() | {"ended": 125.0})
    values = summarise(run).values
    assert values["parts"]["unknown"] == pytest.approx(20, abs=0.02)
    assert "unknown 20.0" in summarise(run).text()


def test_goodput_is_shown_for_long_or_restarted_runs(run: Folder) -> None:
    assert "  goodput" not in summarise(run).text()
    run.write_record(run.read_record() | {"starts": 2, "lost": {"pause_s": 0.1, "down_killed_s": 3.0}, "ended": 108.0})
    assert "down killed 3.00" in summarise(run).text()
    assert "goodput 38.0% of 7.9 s in 2 starts" in summarise(run).text()


def test_the_line_of_times_adds_up_as_it_is_printed(run: Folder) -> None:
    (line,) = [line for line in summarise(run).text().splitlines() if line.startswith("  time ")]
    whole, _, parts = line.partition("=")
    seconds = [float(part.split()[-1]) for part in parts.split("+")]
    assert sum(seconds) == pytest.approx(float(whole.split()[1]), rel=0.02)


def test_a_stopped_run_shows_its_step_once(run: Folder) -> None:
    run.write_record(run.read_record() | {"state": "stopped", "step": 20, "reason": "saved at step 20 of 30"})
    assert summarise(run).text().splitlines()[0] == "trial: stopped at step 20 of 30"


def test_damaged_lines_are_reported(run: Folder) -> None:
    with run.metrics.open("a") as file:
        file.write("{}\n")
    assert "metrics.jsonl: 1 damaged line skipped, the first is line 6" in summarise(run).text()


def test_the_command_prints_text_and_json(run: Folder, in_process: Dtrain) -> None:
    assert (
        "finished with accuracy 80.00% on 60 held-out examples (30 steps, 2.5 epochs, 4.9 s)"
        in in_process("report", run.path).stdout
    )
    assert json.loads(in_process("report", run.path, "--json").stdout)["step"] == 30


def test_a_folder_without_a_run_is_refused(tmp_path: Path, in_process: Dtrain) -> None:
    with pytest.raises(RecipeError, match=r"run\.json is missing"):
        summarise(Folder(tmp_path))
    in_process("report", tmp_path / "nowhere", code=2)


def test_the_bill_stands_beside_the_plan_and_says_where_the_difference_is(run: Folder) -> None:
    assert not summarise(run).values["bill"]
    plan = {"target": "v5e-16", "tier": "compiled", "step_s": 0.05, "dollars_hour": 7200.0}
    run.write_record(run.read_record() | {"planned": plan})
    bill = summarise(run).values["bill"]
    assert (bill["planned_s"], bill["spent_s"]) == pytest.approx((30 * 0.05, 4.9))
    assert sum(bill["differences_s"].values()) == pytest.approx(4.9 - 1.5)
    assert bill["differences_s"]["steps"] == pytest.approx(3.0 - 1.5)  # dispatch and device
    shown = summarise(run).text()
    line = "bill   $9.80 spent at $7,200.00 an hour, $3.00 planned for the steps (v5e-16, compiled): steps +$3.00"
    assert f"{line}, compile +$2.00, data +$1.00, evaluate +$0.40" in shown
    run.write_record(run.read_record() | {"planned": plan | {"dollars_hour": None, "step_s": 0.2}})
    assert "4.9 s spent, 6.0 s planned for the steps (v5e-16, compiled): steps -3.0 s" in summarise(run).text()
