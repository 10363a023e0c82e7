"""Injected faults and their effects on a run: the matrix of docs/reliability.md."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import manifest
from dtrain.core import heartbeat
from dtrain.core.run_dir import saved_steps
from tests.conftest import PACED, Dtrain, bare_environment
from tests.train.test_run import RECIPE, numbers, saved
from tests.waiting import until

OFTEN = ["checkpoint.every=4", "checkpoint.keep=3"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run without faults; run once for each command."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*options: str) -> Path:
        if options not in made:
            folder = tmp_path_factory.mktemp("straight")
            (folder / "small.yaml").write_text(RECIPE)
            command = [sys.executable, "-m", "dtrain", "run", "small.yaml", *options]
            subprocess.run(command, cwd=folder, env=bare_environment(), capture_output=True, check=True)
            made[options] = folder / "runs" / "small"
        return made[options]

    return make


def started(folder: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dtrain", "run", "small.yaml", *options]
    return subprocess.Popen(
        command, cwd=folder, env=bare_environment() | PACED | environment, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def reached(run: Path, step: int, rank: int = 0, seconds: float = 200) -> None:
    """Wait until a process has done that step."""

    def holds() -> bool:
        sign = heartbeat.read(run / f"beat-{rank}.json")
        return sign is not None and sign.step >= step

    until(holds, f"step {step} was not reached", seconds)


def within(section: str, run: Path, rank: int = 0, seconds: float = 200) -> None:
    """Wait until a process is in that section."""

    def holds() -> bool:
        sign = heartbeat.read(run / f"beat-{rank}.json")
        return sign is not None and sign.section == section

    until(holds, f"{section} was not begun", seconds)


def children(pid: int) -> set[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return {int(line) for line in found.stdout.split()}


def alive(pids: set[int]) -> set[int]:
    there = {pid for pid in pids if Path(f"/proc/{pid}").exists()}
    return {pid for pid in there if ") Z " not in Path(f"/proc/{pid}/stat").read_text()}


def record(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    ["step:9", "save:commit", *(pytest.param(p, marks=pytest.mark.nightly) for p in (
        "save:begin", "save:digest", "save:manifest", "save:committed", "retire", "compile", "restore",
    ))],
)  # fmt: skip
def test_a_run_killed_anywhere_resumes_to_the_same_bits(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, undisturbed: Callable[..., Path], point: str
) -> None:
    if point == "restore":
        dtrain("run", recipe, *OFTEN, code=-9, DTRAIN_FAULT="kill@step:9")
    dtrain("run", recipe, *OFTEN, code=-9, DTRAIN_FAULT=f"kill@{point}")
    done = dtrain("run", recipe, *OFTEN)
    run, straight = tmp_path / "runs" / "small", undisturbed(*OFTEN)
    assert saved(run, 24) == saved(straight, 24)
    assert numbers(run) == numbers(straight)
    assert "took over the stale lease of process" in done.stderr
    assert record(run)["starts"] == 2 + (point == "restore")
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_flipped_bit_is_found_and_the_step_before_is_taken(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    dtrain("run", recipe, *OFTEN, code=-9, DTRAIN_FAULT="kill@step:15")
    run = tmp_path / "runs" / "small"
    steps = sorted(saved_steps(run / "checkpoints"))
    data = max((run / "checkpoints" / str(steps[-1])).rglob("d/*"), key=lambda path: path.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 4
    data.write_bytes(raw)
    done = dtrain("run", recipe, *OFTEN)
    assert f"checkpoint {steps[-1]} is damaged and set aside as .bad-{steps[-1]}-" in done.stderr
    assert f"resumed from step {steps[-2]}" in done.stderr
    assert saved(run, 24) == saved(undisturbed(*OFTEN), 24)


@pytest.mark.slow
def test_values_other_than_those_saved_are_not_resumed_from(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    """All files match the manifest, but not the checksum of the state: as if memory had failed before the write."""
    dtrain("run", recipe, *OFTEN, code=-9, DTRAIN_FAULT="kill@step:15")
    run = tmp_path / "runs" / "small"
    newest, before = saved_steps(run / "checkpoints")[:2]
    values = manifest.read(run / "checkpoints" / str(newest))
    replace(values, checksum=[values.checksum[0] ^ 1, values.checksum[1]]).write(run / "checkpoints" / str(newest))
    done = dtrain("run", recipe, *OFTEN)
    assert "the restored values do not have the checksum of the saved ones" in done.stderr
    assert f"resumed from step {before}" in done.stderr
    assert saved(run, 24) == saved(undisturbed(*OFTEN), 24)


@pytest.mark.nightly
def test_a_save_that_outlasts_the_grace_is_warned_of_once(dtrain: Dtrain, recipe: Path) -> None:
    done = dtrain("run", recipe, *OFTEN, "checkpoint.grace=0.001")
    assert len(re.findall(r"a save takes \d+ s; a preempted machine has 0 s", done.stderr)) == 1


@pytest.mark.slow
def test_with_every_checkpoint_damaged_a_run_does_not_start_over(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    dtrain("run", recipe, *OFTEN, code=-9, DTRAIN_FAULT="kill@step:15")
    for path in (tmp_path / "runs" / "small" / "checkpoints").rglob("manifest.ocdbt"):
        path.write_bytes(b"")
    refused = dtrain("run", recipe, *OFTEN, code=5)
    assert "no checkpoint in" in refused.stderr
    assert "name=..." in refused.stderr
    assert dtrain("run", recipe, *OFTEN, code=5).stdout == ""


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_kept_out(recipe: Path, tmp_path: Path, dtrain: Dtrain) -> None:
    first = started(tmp_path, "steps=100000", "evaluate.every=0")
    try:
        reached(tmp_path / "runs" / "small", 3)
        refused = dtrain("run", recipe, "steps=100000", "evaluate.every=0", code=6)
        assert f"is in use by process {first.pid} on" in refused.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["save:digest", pytest.param("save:commit", marks=pytest.mark.nightly)])
def test_a_full_disk_ends_with_3_and_nothing_is_lost(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, undisturbed: Callable[..., Path], point: str
) -> None:
    dtrain("run", recipe, *OFTEN, code=-9, DTRAIN_FAULT="kill@step:9")
    failed = dtrain("run", recipe, *OFTEN, code=3, DTRAIN_FAULT=f"full@{point}")
    assert "No space left on device" in failed.stderr
    run = tmp_path / "runs" / "small"
    assert record(run)["exit_code"] == 3
    assert not list((run / "checkpoints").glob(".*"))
    dtrain("run", recipe, *OFTEN)
    assert saved(run, 24) == saved(undisturbed(*OFTEN), 24)


TWO = ["--devices", "4", "--processes", "2", "mesh.fsdp=2", *OFTEN]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_worker_is_named_and_the_run_resumes_to_the_same_bits(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, undisturbed: Callable[..., Path], rank: int
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    done = dtrain("run", recipe, *TWO, DTRAIN_FAULT=f"kill@step:14/{rank}", DTRAIN_FAULT_NOTES=str(notes))
    assert f"process {rank} ended first: killed by SIGKILL" in done.stderr
    assert re.search(r"restarting from step (8|12) \(1 of 3", done.stderr)
    assert saved(tmp_path / "runs" / "small", 24) == saved(undisturbed(*TWO), 24)


@pytest.mark.slow
def test_a_worker_that_dies_before_the_rendezvous_is_named(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    done = dtrain("run", recipe, *TWO, DTRAIN_FAULT="kill@join/1", DTRAIN_FAULT_NOTES=str(notes))
    assert "process 1 ended first: killed by SIGKILL" in done.stderr
    assert "restarting from step 0 (1 of 3" in done.stderr


@pytest.mark.nightly
def test_stopped_while_compiling_two_processes_exit_after_the_first_step(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    """JAX's preemption service takes the signal and reports it at the first step that all processes agree on."""
    parent = started(tmp_path, *TWO, DTRAIN_FAULT="sleep@compile")
    run = tmp_path / "runs" / "small"
    within("compile", run)
    parent.send_signal(signal.SIGTERM)
    _, output = parent.communicate(timeout=200)
    assert parent.returncode == 75, output
    assert record(run)["step"] in (0, 1)
    dtrain("run", recipe, *TWO)
    assert saved(run, 24) == saved(undisturbed(*TWO), 24)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_xla_compiles_ends_one_process_at_once(recipe: Path, tmp_path: Path, number: int) -> None:
    """An orderly exit would crash: a thread is inside the compiler."""
    one = started(tmp_path, XDG_CACHE_HOME=str(tmp_path / "empty"))
    run = tmp_path / "runs" / "small"
    within("compile", run)
    time.sleep(0.3)
    one.send_signal(number)
    _, shown = one.communicate(timeout=200)
    assert one.returncode == 75, shown
    assert (record(run)["state"], record(run)["exit_code"], record(run)["step"]) == ("stopped", 75, 0)
    assert not (run / "lease.json").exists()


@pytest.mark.slow
def test_a_stop_in_the_last_evaluation_leaves_it_to_the_next_start(
    dtrain: Dtrain, recipe: Path, tmp_path: Path
) -> None:
    dtrain("run", recipe, "evaluate.every=0", code=75, DTRAIN_FAULT="term@step:24")
    run = tmp_path / "runs" / "small"
    assert (record(run)["state"], record(run)["step"]) == ("stopped", 24)
    assert not [row for row in numbers(run) if "eval/loss" in row]
    dtrain("run", recipe, "evaluate.every=0")
    assert [row["step"] for row in numbers(run) if "eval/loss" in row] == [24]
    assert record(run)["state"] == "finished"


@pytest.mark.nightly
def test_a_frozen_worker_is_found_and_the_run_resumes(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    values = {"DTRAIN_FAULT": "freeze@step:14/1", "DTRAIN_FAULT_NOTES": str(notes)}
    done = dtrain("run", recipe, *TWO, "guard.patience=4", **values)
    assert re.search(r"process 1: no heartbeat for \d+ s, in step after step 14", done.stderr)
    assert "Current thread" in done.stderr or "Thread 0x" in done.stderr
    assert saved(tmp_path / "runs" / "small", 24) == saved(undisturbed(*TWO), 24)


@pytest.mark.slow
def test_a_run_without_progress_ends_with_8(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    failed = dtrain("run", recipe, "--restarts", "1", code=8, DTRAIN_FAULT="kill@step:3")
    assert "process 0 ended first: killed by SIGKILL" in failed.stderr
    assert "restarted 1 time without a new checkpoint" in failed.stderr
    folder = tmp_path / "runs" / "small"
    assert (record(folder)["state"], record(folder)["exit_code"]) == ("failed", 8)
    assert "error: restarted 1 time without a new checkpoint" in (folder / "log.txt").read_text().splitlines()[-1]


@pytest.mark.slow
def test_an_error_in_one_process_is_shown_as_the_cause(dtrain: Dtrain, recipe: Path) -> None:
    start = time.monotonic()
    failed = dtrain("run", recipe, *TWO, "--restarts", "0", code=70, DTRAIN_FAULT="raise@step:5/1")
    assert "  (1) RuntimeError: injected fault: raise@step:5/1" in failed.stderr
    assert "process 1 ended first: exit code 70" in failed.stderr
    assert time.monotonic() - start < 60


@pytest.mark.nightly
def test_what_would_come_again_is_not_tried_again(dtrain: Dtrain, recipe: Path) -> None:
    failed = dtrain("run", recipe, "--restarts", "3", "optimizer={kind: adamw, lr: 1e4, decay: 0.9}", code=7)
    assert "restarting" not in failed.stderr


@pytest.mark.nightly
def test_workers_exit_with_their_supervisor(recipe: Path, tmp_path: Path, dtrain: Dtrain) -> None:
    parent = started(tmp_path, "steps=100000", "evaluate.every=0", "--devices", "4", "--processes", "2")
    reached(tmp_path / "runs" / "small", 3)
    workers = children(parent.pid)
    assert len(workers) == 2
    parent.kill()
    parent.communicate()
    until(lambda: not alive(workers), "the workers live on")
    done = dtrain("run", recipe, "steps=40", "evaluate.every=0", "--devices", "4", "--processes", "2")
    assert "took over the stale lease of process" in done.stderr
    assert "proxy variable" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("to", ["parent", *(pytest.param(to, marks=pytest.mark.nightly) for to in ("first", "last"))])
def test_stopped_all_processes_agree_on_a_step_and_save(recipe: Path, tmp_path: Path, to: str) -> None:
    parent = started(tmp_path, "steps=100000", "evaluate.every=0", "--devices", "4", "--processes", "2")
    run = tmp_path / "runs" / "small"
    reached(run, 3)
    workers = sorted(children(parent.pid))
    os.kill({"parent": parent.pid, "first": workers[0], "last": workers[-1]}[to], signal.SIGTERM)
    _, output = parent.communicate(timeout=200)
    assert parent.returncode == 75, output
    assert not alive(set(workers))
    values = record(run)
    assert (values["state"], values["exit_code"]) == ("stopped", 75)
    assert (run / "checkpoints" / str(values["step"]) / "MANIFEST.json").exists()


@pytest.mark.slow
def test_a_second_signal_exits_at_once_and_is_recorded(recipe: Path, tmp_path: Path) -> None:
    one = started(tmp_path, "steps=100000", "evaluate.every=0", DTRAIN_FAULT="sleep@step:5")
    run = tmp_path / "runs" / "small"
    reached(run, 1)
    time.sleep(1)  # it sleeps after step 5, a few milliseconds later
    one.send_signal(signal.SIGINT)
    time.sleep(0.5)
    one.send_signal(signal.SIGINT)
    one.communicate(timeout=200)
    assert one.returncode == 130
    assert record(run)["state"] == "aborted"


@pytest.mark.nightly
def test_two_processes_save_by_time_at_the_same_steps_and_end_with_the_same_bits(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    two = [*TWO[:-2], "checkpoint.keep=9"]
    dtrain("run", recipe, *two, "checkpoint.minutes=0.0001")
    run = tmp_path / "runs" / "small"
    assert len(saved_steps(run / "checkpoints")) > 2
    assert saved(run, 24) == saved(undisturbed(*two), 24)


@pytest.mark.slow
def test_an_evaluation_that_a_stop_left_out_is_made_after_it(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    eval_pending = ["evaluate.every=6", "checkpoint.best=eval/loss", "checkpoint.keep=9"]
    dtrain("run", recipe, *eval_pending, code=75, DTRAIN_FAULT="term@step:11")
    run = tmp_path / "runs" / "small"
    measured = lambda: [row["step"] for row in numbers(run) if "eval/loss" in row]  # noqa: E731
    assert measured() == [6]
    dtrain("run", recipe, *eval_pending)
    assert measured() == [6, 12, 18, 24]
    assert "eval/loss" in json.loads((run / "checkpoints" / "12" / "MANIFEST.json").read_text())["metrics"]
    assert record(run)["lost"]["down_stopped_s"] > 0


SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS")


@pytest.mark.slow
def test_no_secret_of_the_environment_is_written_anywhere(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    canary = "canary-0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"
    values = dict.fromkeys(SECRETS, canary)
    done = dtrain("run", recipe, "track.to=[{kind: tensorboard}, {kind: wandb, mode: offline}]", **values)
    assert canary not in done.stdout + done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert not [path for path in written if canary.encode() in path.read_bytes()]


@pytest.mark.nightly
def test_a_campaign_of_kills_loses_nothing(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "kill_campaign.py"
    done = subprocess.run(
        [sys.executable, program, "5"],
        cwd=tmp_path,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost, 0 wrong" in done.stdout
    assert "the end: the same bits" in done.stdout


@pytest.mark.nightly
def test_verify_gives_a_certificate(dtrain: Dtrain, recipe: Path) -> None:
    values = dtrain("verify", recipe, "--kills", "2", "--devices", "2", "--json", seconds=300)
    found = json.loads(values.stdout)
    assert found["kept"]
    assert [one["what"] for one in found["findings"]] == [
        "killed 2 times, resumed",
        "engine shard_map",
        "in two processes",
    ]
    assert found["findings"][0]["shown"].startswith("the same bits; ")


def test_every_line_of_the_matrix_names_a_test_that_exists() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    named = set(re.findall(r"\b(test_\w+)(?!\w|\.py)", page))
    written = "\n".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert len(named) > 20
    assert not [name for name in named if f"def {name}" not in written]


@pytest.mark.slow
def test_where_the_checkpoints_are_gone_it_does_not_begin_anew(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    dtrain("run", recipe, *OFTEN, code=-9, DTRAIN_FAULT="kill@step:15")
    run = tmp_path / "runs" / "small"
    before = (run / "metrics.jsonl").read_text()
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    refused = dtrain("run", recipe, *OFTEN, code=5)
    assert "the run folder has no checkpoint" in refused.stderr
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_stopped_before_its_first_start_the_supervisor_starts_nothing(recipe: Path, tmp_path: Path) -> None:
    parent = started(tmp_path, "--restarts", "3")
    until(lambda: children(parent.pid))
    parent.send_signal(signal.SIGTERM)
    _, output = parent.communicate(timeout=200)
    assert parent.returncode == 75, output
    assert "restarting" not in output


@pytest.mark.nightly
def test_one_request_that_arrives_twice_is_one(recipe: Path, tmp_path: Path) -> None:
    """A service manager signals every process, and the supervisor forwards its signal as well."""
    parent = started(tmp_path, "steps=100000", "evaluate.every=0", "--restarts", "3")
    run = tmp_path / "runs" / "small"
    reached(run, 3)
    for pid in (*children(parent.pid), parent.pid):
        os.kill(pid, signal.SIGTERM)
    _, output = parent.communicate(timeout=200)
    assert parent.returncode == 75, output
    assert record(run)["state"] == "stopped"
