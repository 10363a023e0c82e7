"""What the charts of runs show: units, names, and means of long curves."""

import json
from pathlib import Path

import numpy as np
import pytest

from dtrain.core.run_dir import Folder
from dtrain.track.charts import charts
from dtrain.track.history import Curve
from dtrain.track.summary import Summary, summarise


def summary(folder: Path, rows: list[dict[str, float]], units: dict[str, str] | None = None) -> Summary:
    place = Folder(folder)
    place.prepare()
    place.write_record({"name": folder.name, "state": "finished", "step": 1, "units": units or {}})
    place.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return summarise(place)


def test_values_are_in_the_unit_of_their_chart(tmp_path: Path) -> None:
    row = {"step": 1, "train/loss": 2.0, "eval/accuracy": 0.25, "eval/rain": 3.0, "eval/wet": 0.5, "rate/mfu": 0.4}
    row |= {"memory/peak_bytes": 3 * 2.0**30, "time/step_ms": 5.0, "time/data_ms": 1.0, "norm/grad/w": 7.0}
    found = charts([summary(tmp_path / "one", [row], {"rain": "mm", "wet": "%"})])
    shown = {one.heading: [(line.short, float(line.mean[0])) for line in one.lines] for one in found}
    assert shown == {
        "loss": [("train", 2.0)],
        "accuracy (%)": [("eval", 25.0)],
        "rain (mm)": [("eval", 3.0)],
        "wet (%)": [("eval", 50.0)],
        "model FLOPs utilisation (%)": [("", 40.0)],
        "peak memory (GiB)": [("", 3.0)],
        "time of a step (ms)": [("step", 5.0), ("data", 1.0)],
        "norm of grad": [("w", 7.0)],
    }


def test_a_chart_says_what_is_smoothed_and_averaged(tmp_path: Path) -> None:
    few = [{"step": step, "train/loss": 1.0} for step in range(5)]
    many = [{"step": step, "train/loss": 1.0 / (step + 1)} for step in range(500)]
    short, long = summary(tmp_path / "short", few), summary(tmp_path / "long", many)
    assert charts([short])[0].drawn == ""
    assert charts([long])[0].drawn == "bright: smoothed, faint: as logged"
    assert charts([long], most=100)[0].drawn.endswith("points: means of up to 5 logged rows")
    plain = charts([short, long])[0].plain([])
    assert [line["exact"] for line in plain["lines"]] == [True, False]


@pytest.mark.parametrize("most", [1, 7, 100, 999, 1000, 5000])
def test_points_of_a_long_curve_are_the_mean_and_range_of_all_their_rows(most: int) -> None:
    values = np.random.default_rng(0).normal(size=1000)
    curve = Curve()
    curve.add(np.arange(1000), values)
    step, mean, low, high = curve.shown(most)
    size = curve.merged(most)
    assert len(step) <= most
    groups = [values[start : start + size] for start in range(0, 1000, size)]
    np.testing.assert_allclose(mean, [group.mean() for group in groups])
    np.testing.assert_array_equal(low, [group.min() for group in groups])
    np.testing.assert_array_equal(high, [group.max() for group in groups])
    assert step[-1] == 999


@pytest.mark.slow
def test_pictures_name_units_steps_and_what_is_smoothed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    from dtrain.track.picture import draw, draw_results

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")  # text as text
    found = []
    for number, lr in enumerate(("1e-3", "5e-3")):
        rows: list[dict[str, float]] = [{"step": step, "train/loss": 1.0 / (step + 1)} for step in range(40)]
        rows.append({"step": 39, "eval/accuracy": 0.5 + 0.25 * number})
        found.append(({"optimizer.lr": lr}, summary(tmp_path / f"lr-{number}", rows, {"accuracy": "%"})))
    draw([one for _, one in found], tmp_path / "both.svg")
    text = (tmp_path / "both.svg").read_text()
    for shown in (">accuracy (%)<", ">step<", ">lr-0 train<", ">lr-1 eval<", "bright: smoothed, faint: as logged"):
        assert shown in text, shown
    assert draw_results(["optimizer.lr"], found, tmp_path / "sweep.svg")
    text = (tmp_path / "sweep.svg").read_text()
    for shown in ("eval/accuracy (%)", "orange: ", "bright: smoothed, faint: as logged", ">75<"):
        assert shown in text, shown
