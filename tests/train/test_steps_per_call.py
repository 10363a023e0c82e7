"""Several steps in one call of the compiled program: the same bits, fewer calls."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.core.heartbeat import LONG, read
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.core.slices import target
from dtrain.plan.memory import with_batches
from dtrain.plan.plan import quick
from dtrain.recipe.load import load
from dtrain.track.console import Console
from dtrain.train import run as runs
from dtrain.train.loop import Calls, StepEvent, loop
from dtrain.train.timers import Clock
from tests.conftest import Dtrain
from tests.train.test_faults import reached, started
from tests.train.test_loss_guard import recipe as broken
from tests.train.test_run import RECIPE, numbers, saved
from tests.waiting import until


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


def test_a_call_ends_after_so_many_steps_and_where_the_state_is_used() -> None:
    found = [list(call) for call in Calls(range(3, 15), 4, lambda step: step == 8)]
    assert found == [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12], [13, 14]]
    assert list(Calls(range(5, 5), 4)) == []


def test_hooks_run_while_the_next_call_does_unless_the_state_is_used() -> None:
    said: list[object] = []

    def step(state: int, batch: int) -> tuple[int, dict[str, Any]]:
        said.append(f"call {batch}")
        return state + batch, {"loss": np.arange(4) + state}

    def hook(event: StepEvent) -> None:
        said.append((event.step, event.state, float(event.metrics["loss"]), event.reached, event.last))

    calls = Calls(range(1, 9), 3, lambda step: step == 6)
    state, stopped = loop(
        step, 0, iter([3, 3, 2]), calls=calls, hooks=[hook], stop=lambda _: False, used=lambda step: step == 6,
        clock=Clock(), one_at_a_time=False,
    )  # fmt: skip  # pyright: ignore
    assert (state, stopped) == (8, False)
    assert said == [
        "call 3",
        "call 3", (1, None, 0, 3, False), (2, None, 1, 3, False), (3, None, 2, 3, False),
        (4, None, 3, 6, False), (5, None, 4, 6, False), (6, 6, 5, 6, False),
        "call 2", (7, None, 6, 8, False), (8, 8, 7, 8, True),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["--devices", "4", "mesh={data: 2, fsdp: 2}", "accumulate=2"], marks=pytest.mark.nightly),
        pytest.param(
            ["--devices", "4", "mesh={fsdp: 2, tensor: 2}", "engine.kind=shard_map"], marks=pytest.mark.nightly
        ),
    ],
)
def test_bits_and_metrics_are_those_of_single_steps(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, options: list[str]
) -> None:
    options += ["checkpoint={every: 5, keep: 9}", "track={every: 1, norms: true}"]
    dtrain("run", recipe, "name=one", *options)
    dtrain("run", recipe, "name=seven", "engine.steps_per_call=7", *options)
    one, seven = tmp_path / "runs" / "one", tmp_path / "runs" / "seven"
    assert saved_steps(seven / "checkpoints") == [24, 20, 15, 10, 5]
    assert all(saved(one, step) == saved(seven, step) for step in (5, 15, 24))
    for folder, steps in ((one, 1), (seven, 7)):
        latest = read(Folder(folder).heartbeat(0))
        assert latest is not None
        assert latest.patience in (300.0 * steps, 300.0 * steps * LONG)  # of a step, or of another section
    assert numbers(one) == numbers(seven)

    dtrain("run", recipe, "name=resumed", "steps=9", "engine.steps_per_call=7", *options)
    again = dtrain("run", recipe, "name=resumed", "engine.steps_per_call=7", *options)
    assert "the same bits" in again.stderr
    assert saved(tmp_path / "runs" / "resumed", 24) == saved(one, 24)


@pytest.mark.slow
def test_the_compiled_program_is_called_once_for_several_steps(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def counted(step: Any, *rest: Any, **options: Any) -> Any:
        return loop(lambda *args: called.append(0) or step(*args), *rest, **options)

    monkeypatch.setattr(runs, "loop", counted)
    runs.run(load(recipe, ["engine.steps_per_call=8", "evaluate.every=0"]), tmp_path / "runs", Console(silent=True))
    assert len(called) == 24 / 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "guard",
    [
        "not_finite: skip",
        *(
            pytest.param(g, marks=pytest.mark.nightly)
            for g in ("not_finite: rollback", "not_finite: stop", "spike: 50")
        ),
    ],
)
def test_a_loss_that_is_not_finite_within_a_call_has_the_same_effect(
    dtrain: Dtrain, tmp_path: Path, guard: str
) -> None:
    code = 7 if "stop" in guard else 0
    path = broken(tmp_path, ".nan" if "not_finite" in guard else "1000.0", guard)
    for name, steps in (("one", 1), ("five", 5)):
        dtrain("run", path, f"name={name}", f"engine.steps_per_call={steps}", "evaluate.every=12", code=code)
    one, five = (tmp_path / "runs" / name for name in ("one", "five"))
    newest = saved_steps(one / "checkpoints")[-1]
    assert saved_steps(five / "checkpoints")[-1] == newest
    assert saved(one, newest) == saved(five, newest)
    assert json.loads((five / "run.json").read_text())["reason"] == json.loads((one / "run.json").read_text())["reason"]


@pytest.mark.slow
def test_the_cause_of_a_nan_is_located_within_a_call(dtrain: Dtrain, tmp_path: Path) -> None:
    path = broken(tmp_path, ".inf", "not_finite: stop, nan: locate")
    shown = dtrain("run", path, "engine.steps_per_call=5", code=7).stderr
    assert "step 30 is the first that is not finite" in shown
    assert "nan comes from" in shown


@pytest.mark.nightly
def test_two_processes_stop_after_a_call_and_resume_to_the_bits_of_one_step_per_call(
    dtrain: Dtrain, recipe: Path, tmp_path: Path
) -> None:
    two = ["--devices", "2", "--processes", "2", "evaluate.every=0", "steps=300"]
    dtrain("run", recipe, "name=straight", *two)
    run = tmp_path / "runs" / "small"
    process = started(tmp_path, *two, "engine.steps_per_call=4")
    reached(run, 9)
    process.send_signal(signal.SIGTERM)
    _, shown = process.communicate(timeout=200)
    assert process.returncode == 75, shown
    [stopped] = saved_steps(run / "checkpoints")
    assert 0 < stopped < 300
    assert stopped % 4 == 0
    dtrain("run", recipe, *two, "engine.steps_per_call=4")
    assert saved(run, 300) == saved(tmp_path / "runs" / "straight", 300)


@pytest.mark.slow
def test_a_save_by_time_is_made_after_a_call(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "small"
    process = started(
        tmp_path, "engine.steps_per_call=16", "steps=4000", "evaluate.every=0", "checkpoint={minutes: 0.01, keep: 99}"
    )
    until(lambda: len(saved_steps(run / "checkpoints")) >= 2)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=200)
    assert process.returncode == 75, shown
    steps = saved_steps(run / "checkpoints")
    assert len(steps) >= 2
    assert all(step % 16 == 0 for step in steps)


@pytest.mark.slow
def test_a_profile_has_the_steps_that_the_recipe_names(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    shown = dtrain("run", recipe, "engine.steps_per_call=8", "profile={start: 6, steps: 5}").stderr
    assert "profile of steps 6 to 10" in shown


@pytest.mark.slow
def test_pmap_runs_one_step_per_call(dtrain: Dtrain, recipe: Path) -> None:
    shown = dtrain("run", recipe, "engine={kind: pmap, steps_per_call: 4}", code=2).stderr
    assert "pmap runs one step per call; steps_per_call is 4" in shown


def test_a_plan_counts_the_batches_of_a_call(recipe: Path) -> None:
    one, four = (quick(load(recipe, [f"engine.steps_per_call={steps}"]), target("v5e-1")).memory for steps in (1, 4))
    more = 3 * one.classes["inputs"]
    assert one.classes["inputs"] == 64 * (64 + 4 + 4)  # images, labels and row numbers
    assert (four.classes, four.peak) == (one.classes | {"inputs": 4 * one.classes["inputs"]}, one.peak + more)
    assert with_batches(one, {}, 3) == one
