"""Every tracker keeps the contract of `dtrain.track.tracker`."""

import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.core.run_dir import Folder
from dtrain.recipe import recipe
from dtrain.recipe.load import part
from dtrain.track.tracker import TrackedRun, TrackerConfig, opened

KINDS: dict[str, Any] = {typing.get_args(member.__annotations__["kind"])[0]: member for member in
                         typing.get_args(recipe.Tracker)}  # fmt: skip
GIVEN: dict[str, dict[str, object]] = {"wandb": {"mode": "disabled"}, "custom": {"target": f"{__name__}:Own"}}


class Own:
    """A user's tracker."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    def log(self, step: int, values: dict[str, float]) -> None:
        with (self.run.folder.path / "own.txt").open("a") as file:
            file.write(f"{step} {sorted(values)}\n")


def config(kind: str) -> TrackerConfig:
    values = {"kind": kind, **GIVEN.get(kind, {})}
    return part(recipe.Tracker, values, "track.to.0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 5])
def test_a_tracker_takes_numbers_and_answers_of_a_new_and_a_resumed_run(kind: str, start: int, tmp_path: Path) -> None:
    warnings: list[str] = []
    run = TrackedRun(Folder(tmp_path), "trial", {"batch": 4}, {}, start, warnings.append)
    with opened(config(kind), run) as tracker:
        tracker.log(start + 1, {"loss": 1.5, "eval/loss": float("nan")})
        tracker.samples(start + 1, [{"prompt": "1 plus 1", "answer": "2", "given": "3 | <b>\n"}])
        tracker.pictures(start + 1, {"digit": np.zeros((4, 6, 3), np.uint8)})
        tracker.log(start + 2, {"loss": 1.25})
    assert not warnings
    assert kind == "wandb" or list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_says_what_it_needs(kind: str) -> None:
    made = config(kind)
    assert isinstance(made, TrackerConfig)
    assert made.kind == kind
    assert made.name == (made.user_code or kind)
    assert isinstance(made.packages, tuple)
    assert bool(made.user_code) == hasattr(made, "target")
    assert made.remote == (kind != "tensorboard")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_that_fails_is_reported_once_by_its_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def log(self, step: int, values: object) -> None:
            raise OSError("no space left")

    warnings: list[str] = []
    run = TrackedRun(Folder(tmp_path), "trial", {}, {}, 0, warnings.append)
    with opened(config(kind), run) as tracker:
        monkeypatch.setattr(tracker, "tracker", Failing())
        tracker.log(1, {})
        tracker.log(2, {})
    assert warnings == [f"track.to: {config(kind).name} failed at step 1 and gets no more metrics: no space left"]
