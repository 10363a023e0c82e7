import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.track.history import FEW, POINTS, Curve, History

ROWS = 5 * FEW


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": n, "train/loss": 1 / n, "time/step_ms": 100.0 if n == 1 else 5.0, "rate/examples_per_s": 8.0}
        for n in range(1, ROWS + 1)
    ]
    rows[10:10] = [{"step": 10, "eval/loss": 0.5, "eval/top": 1}]
    rows += [{"step": ROWS, "eval/loss": math.nan, "eval/top": 3}, {"step": ROWS, "eval/loss": 0.75}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def facts(history: History) -> object:
    extremes = {name: dict(one) for name, one in history.extremes.items()}
    return history.rows, history.last["train/loss"], extremes, history.evaluations, history.speed(), history.damaged


def test_many_rows_give_what_few_rows_give(metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = facts(History(metrics).update())
    monkeypatch.setattr("dtrain.track.history.FEW", 10**9)  # Python's own parser
    assert facts(History(metrics).update()) == fast
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    assert facts(History(metrics).update()) == fast
    assert fast[0] == ROWS + 3  # pyright: ignore[reportIndexIssue]
    assert fast[2] == {  # pyright: ignore[reportIndexIssue]
        "eval/loss": {"min": (0.5, 10), "max": (0.75, ROWS)},
        "eval/top": {"min": (1, 10), "max": (3, ROWS)},
    }
    assert fast[4] == {"step_ms": 5.0, "steps_per_s": 200.0, "examples_per_s": 8.0}  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("bad", ["{}", "[1]", '{"step": 1, "x": "a"}', '{"step": -1}', "nonsense", '{"step": true}'])
@pytest.mark.parametrize("few", [FEW, 1])
def test_damaged_lines_are_counted_in_both_ways_of_reading(
    metrics: Path, monkeypatch: pytest.MonkeyPatch, bad: str, few: int
) -> None:
    monkeypatch.setattr("dtrain.track.history.FEW", few)
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:6], bad + "\n", *lines[6:], '{"step": 5']))
    history = History(metrics).update()
    assert history.damaged == [7]
    assert history.rows == ROWS + 3


def test_what_is_appended_is_read_and_a_replaced_file_is_read_again(metrics: Path) -> None:
    history = History(metrics).update()
    with metrics.open("a") as file:
        file.write('{"step": 20000, "train/loss": 7.0}\n{"step": 20001')
    assert history.update().last["train/loss"] == 7.0
    with metrics.open("a") as file:
        file.write(', "train/loss": 8.0}\n')
    assert history.update().last["train/loss"] == 8.0
    assert (history.rows, history.damaged) == (ROWS + 5, [])
    other = metrics.with_name("part")
    other.write_text('{"step": 1, "train/loss": 3.0}\n' * 100)
    other.replace(metrics)
    assert facts(history.update())[:2] == (100, 3.0)  # pyright: ignore[reportIndexIssue]


def test_a_curve_of_a_million_points_keeps_its_mean_and_range() -> None:
    values = np.random.default_rng(0).normal(size=1_000_000).cumsum()
    curve = Curve()
    for start in range(0, len(values), 30_001):  # blocks that divide nothing
        block = values[start : start + 30_001]
        curve.add(np.arange(start, start + len(block)), block)
    step, mean, low, high = curve.shown()
    assert POINTS <= len(step) <= 2 * POINTS
    assert step[-1] == 999_999
    assert (low.min(), high.max()) == (values.min(), values.max())
    assert np.average(mean, weights=curve.points[2]) == pytest.approx(values.mean())
    assert curve.points[2].sum() == 1_000_000
    at = len(step) // 2
    here = values[int(step[at - 1]) + 1 : int(step[at]) + 1]
    assert (mean[at], low[at], high[at]) == (pytest.approx(here.mean()), here.min(), here.max())


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    curve = Curve()
    curve.add(np.arange(4), np.array([1.0, math.nan, 3.0, math.inf]))
    assert curve.shown()[1].tolist() == [1.0, 3.0]
    assert curve.not_finite == 2


def test_a_folder_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        History(tmp_path).update()
