"""A run on this machine: it continues without its terminal, and is followed, stopped and removed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.core.lease import start_time
from dtrain.launch.runner import RunnerDir
from dtrain.launch.wire import HostJob
from tests.conftest import Dtrain, bare_environment
from tests.launch.processes import mentioning
from tests.launch.test_names import RECIPE
from tests.train.test_faults import reached
from tests.waiting import until

CANARY = "canary-0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(f"{RECIPE}launch: {{kind: local, folder: {tmp_path}/host, environment: [MY_TOKEN]}}\n")
    return path


def runner_dir(tmp_path: Path) -> RunnerDir:
    return RunnerDir(HostJob(name="small", folder=str(tmp_path / "host"), runs="runs"))


@pytest.mark.slow
def test_plan_changes_nothing_and_shows_what_up_would_do(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    shown = dtrain("launch", "plan", recipe, MY_TOKEN=CANARY)
    assert "-m dtrain.launch.agent" in shown.stdout
    assert "kind: mlp" in shown.stdout
    assert "1 host" in shown.stderr
    assert CANARY not in shown.stdout + shown.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]


@pytest.mark.slow
def test_a_run_continues_without_a_terminal_and_leaves_nothing(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    long = ["steps=1000000", "evaluate.every=0", "checkpoint.every=200"]
    started = dtrain("launch", "up", recipe, "--yes", "--detach", *long, MY_TOKEN=CANARY)
    assert "small is started" in started.stderr
    again = dtrain("launch", "up", recipe, "--yes", *long, code=6, MY_TOKEN=CANARY)
    assert "small runs here already, as process" in again.stderr
    reached(tmp_path / "runs" / "small", 1)
    assert " after step " in dtrain("launch", "status", "small").stdout
    alive = runner_dir(tmp_path).living()
    assert len(alive) == 2
    for pid in alive:
        assert CANARY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert CANARY.encode() in Path(f"/proc/{alive[1]}/environ").read_bytes()
    stopped = dtrain("launch", "stop", "small")
    assert re.search(r"here: stopped step \d+/1000000 saved", stopped.stderr)
    assert not [pid for pid in alive if start_time(pid)]
    assert "ended" in dtrain("launch", "logs", "small").stdout
    saved = json.loads((tmp_path / "runs" / "small" / "run.json").read_text())["step"]
    assert (tmp_path / "runs" / "small" / "stop").exists()
    finished = dtrain("launch", "up", recipe, "--yes", *long[1:], f"steps={saved + 300}", MY_TOKEN=CANARY)
    assert f"resumed from step {saved}" in finished.stdout
    assert "-- ended: exit code 0" in finished.stdout
    assert not (tmp_path / "runs" / "small" / "stop").exists()
    other = ("--runs-dir", tmp_path / "other")  # as on another machine, with access to the host but not to this folder
    assert "ended" in dtrain("launch", "status", recipe, *other).stdout
    assert "\nsmall  local   ended" in dtrain("launch", "list").stdout
    down = dtrain("launch", "down", "small", "--yes")
    assert "this removes, without waiting for a save:" in down.stderr
    assert not (tmp_path / "host" / "small").exists()
    assert (tmp_path / "runs" / "small" / "checkpoints").is_dir()
    assert dtrain("launch", "list").stdout == ""
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]


@pytest.mark.nightly
def test_down_ends_every_process_at_once(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    dtrain("launch", "up", recipe, "--yes", "-d", "steps=1000000", "launch.processes=2", MY_TOKEN=CANARY)
    reached(tmp_path / "runs" / "small", 1)
    family = mentioning(str(tmp_path / "host"))
    assert len(family) == 4  # the runner, the supervisor, two workers
    dtrain("launch", "down", "small", "--yes")
    assert not mentioning(str(tmp_path / "host"))


@pytest.mark.slow
def test_a_run_whose_runner_died_is_shown_as_running_and_stops(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    long = ["steps=1000000", "evaluate.every=0", "checkpoint.every=200"]
    dtrain("launch", "up", recipe, "--yes", "--detach", *long, MY_TOKEN=CANARY)
    reached(tmp_path / "runs" / "small", 1)
    runner, run = runner_dir(tmp_path).living()
    os.kill(runner, signal.SIGKILL)
    until(lambda: not start_time(runner), "the runner is alive")
    shown = dtrain("launch", "status", "small").stdout
    assert re.search(r"here +running +in \w+ after step \d+; .*; its runner died: it is not restarted", shown)
    stopped = dtrain("launch", "stop", "small")
    assert re.search(r"here: stopped step \d+/1000000 saved", stopped.stderr)
    assert not start_time(run)
    record = json.loads((tmp_path / "runs" / "small" / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("stopped", 0)


@pytest.mark.nightly
def test_two_stop_requests_still_save(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    variables = {"MY_TOKEN": CANARY, "DTRAIN_FAULT": "sleep@save:begin"}
    dtrain("launch", "up", recipe, "--yes", "-d", "steps=1000000", "evaluate.every=0", **variables)
    reached(tmp_path / "runs" / "small", 1)
    first = subprocess.Popen(
        [sys.executable, "-m", "dtrain", "launch", "stop", "small"], cwd=tmp_path, env=bare_environment(),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(runner_dir(tmp_path).stopping.exists, "no stop was requested")
    second = dtrain("launch", "stop", "small")
    for text in (second.stderr, first.communicate(timeout=200)[1]):
        assert re.search(r"here: stopped step \d+/1000000 saved", text)


@pytest.mark.nightly
def test_a_run_ends_at_its_limit_of_hours(dtrain: Dtrain, recipe: Path) -> None:
    done = dtrain("launch", "up", recipe, "--yes", "steps=1000000", "launch.hours=0.002", MY_TOKEN=CANARY)
    assert "the time limit of" in done.stdout


@pytest.mark.slow
def test_missing_requirements_are_reported_before_anything_starts(
    in_process: Dtrain, recipe: Path, tmp_path: Path
) -> None:
    missing = in_process("launch", "up", recipe, "--yes", code=3)
    assert "not set here: MY_TOKEN" in missing.stderr
    nobody = in_process("launch", "up", recipe, "--yes", "launch.python=/no/python", code=3, MY_TOKEN=CANARY)
    assert "/no/python: No such file or directory" in nobody.stderr
    (tmp_path / "file").touch()
    blocked = in_process("launch", "up", recipe, "--yes", f"launch.runs={tmp_path}/file", code=3, MY_TOKEN=CANARY)
    assert f"cannot write to {tmp_path}/file" in blocked.stderr
    started = in_process("launch", "up", recipe, "--yes", f"launch.folder={tmp_path}/file", code=3, MY_TOKEN=CANARY)
    assert "Not a directory" in started.stderr
    assert not (tmp_path / "runs" / "small").exists()
    assert not runner_dir(tmp_path).living()
    asked = in_process("launch", "up", recipe, code=2, MY_TOKEN=CANARY)
    assert "standard input is not a terminal" in asked.stderr
    assert "no launch section" in in_process("launch", "up", "mlp-digits", "--yes", code=2).stderr
    assert "no launch record of 'nix'" in in_process("launch", "status", "nix", code=2).stderr
    assert "../x" in in_process("launch", "status", "../x", code=2).stderr
