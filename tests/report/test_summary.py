import json
from pathlib import Path

import pytest

from dtrain.errors import RecipeError
from dtrain.folder import Folder
from dtrain.report.summary import summarise
from tests.conftest import Dtrain


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    place = Folder(tmp_path / "trial")
    place.prepare()
    seconds = {"compile": 1.0, "data": 0.5, "step": 3.0, "evaluate": 0.2, "save": 0.1}
    place.write_record({"name": "trial", "state": "finished", "step": 30, "steps": 30, "seconds": seconds})
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


def test_the_command_prints_text_and_json(run: Folder, dtrain: Dtrain) -> None:
    assert "finished at step 30 of 30" in dtrain("report", run.path).stdout
    assert json.loads(dtrain("report", run.path, "--json").stdout)["step"] == 30
    assert len(json.loads(dtrain("report", run.path, run.path, "--json").stdout)) == 2


def test_a_folder_without_a_run_is_refused(tmp_path: Path, dtrain: Dtrain) -> None:
    with pytest.raises(RecipeError, match=r"run\.json is missing"):
        summarise(Folder(tmp_path))
    dtrain("report", tmp_path / "nowhere", code=2)
