"""Jobs on a real SLURM of four nodes, all of them on this machine."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from dtrain.core.errors import Locked, RecipeError
from dtrain.core.run_dir import saved_steps
from dtrain.launch.job import LaunchJob, fill_template
from dtrain.launch.targets.slurm import PROCESS, JobState, Slurm, job_state, seconds_of
from tests.conftest import SHARED, Dtrain, alone, bare_environment
from tests.launch.processes import mentioning
from tests.launch.test_names import RECIPE, refused
from tests.waiting import until

KIT = SHARED / "kits" / "slurm"
CHECKOUT = Path(__file__).parents[3]
NODES = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which sbatch finds the cluster."""
    if not KIT.is_dir():
        pytest.skip("the simulated cluster is not in the shared folder next to this checkout")
    if os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "unshare"))):
        pytest.skip("the simulated cluster needs root, slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    values = {"SLURM_CONF": str(folder / "slurm.conf")}
    with alone("slurm"), (folder / "output").open("w") as output:
        yield from _cluster(folder, values, output)


def _cluster(folder: Path, values: dict[str, str], output: IO[str]) -> Iterator[dict[str, str]]:
    up = subprocess.Popen(["bash", KIT / "up.sh", str(NODES), folder], stdout=output, stderr=output)
    try:
        until(lambda: "idle" in _output("sinfo", values), "the cluster did not come up")
        yield values
    finally:
        for path in folder.glob("*.pid"):
            subprocess.run(["kill", "-9", path.read_text().strip()], check=False, capture_output=True)
        up.kill()
        up.wait()


def _output(command: str, values: dict[str, str]) -> str:
    done = subprocess.run(command.split(), env=os.environ | values, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def recipe(tmp_path: Path) -> Path:
    """A run of two nodes whose Python first prints the id of its launch."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\necho "launch $DTRAIN_LAUNCH"\nexport PYTHONPATH={CHECKOUT}\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    path = tmp_path / "small.yaml"
    section = f"{{kind: slurm, nodes: 2, python: {python}, runs: {tmp_path}/runs, devices: 4, environment: [MY_TOKEN]}}"
    path.write_text(f"{RECIPE}track: {{every: 50}}\ncheckpoint: {{every: 50}}\nlaunch: {section}\n")
    return path


@pytest.mark.slurm
@pytest.mark.nightly
def test_a_job_on_two_nodes_stops_resumes_is_requeued_and_cancelled(
    in_process: Dtrain, tmp_path: Path, cluster: dict[str, str]
) -> None:
    canary = "canary-0a1b2c3d4e5f6071"
    values, folder = cluster | {"MY_TOKEN": canary}, tmp_path / "runs" / "small"
    away = ["--runs-dir", tmp_path / "laptop"]
    state = lambda: in_process("launch", "status", "small", *away, **values).stdout  # noqa: E731
    up = in_process("launch", "up", recipe(tmp_path), "--yes", "-d", "steps=1000000", *away, **values)
    assert f"run folders: {tmp_path}/runs, the same" in up.stderr
    assert "environment variables sent: MY_TOKEN" in up.stderr
    assert f"not checked: whether the nodes share {tmp_path}/runs" in up.stderr
    again = in_process("launch", "up", recipe(tmp_path), "--yes", "--runs-dir", "third", code=6, **values)
    assert re.search(r"small is in the queue as job \d+", again.stderr)  # although it was launched from another folder
    until(lambda: saved_steps(folder / "checkpoints") != [], "no step was saved", 240)
    assert re.search(r"running   dt\[1-2\], step \d+/1000000 saved", state())
    rows = json.loads(in_process("launch", "status", "small", "--json", *away, **values).stdout)
    assert 0 < rows[0]["seconds"] < 3600
    third = in_process("launch", "status", recipe(tmp_path), "--runs-dir", "third", **values).stdout
    assert third.partition(",")[0] == state().partition(",")[0]
    in_process("launch", "stop", recipe(tmp_path), "--runs-dir", "third", **values)
    assert (folder / "stop").exists()
    assert re.search(r"job \d+  stopped   dt\[1-2\], step \d+/1000000 saved", state())
    output = in_process("launch", "logs", "small", *away, **values).stdout
    assert "[0] compiled in" in output
    assert re.search(r"\[job\] == exit code (0|75)\n", output)
    assert "[0]" not in in_process("launch", "logs", "small", "--host", "1", *away, **values).stdout
    first = set(re.findall(r"launch ([0-9a-f]{8})", output))
    in_process("launch", "up", recipe(tmp_path), "--yes", "-d", "steps=1000000", *away, **values)
    assert not (folder / "stop").exists()
    log = folder / "launch" / "log.txt"
    until(lambda: log.exists() and "resumed from step" in log.read_text(), "it did not resume")
    number = re.findall(r"job (\d+)", state())[0]
    _output(f"scontrol requeue {number}", cluster)
    until(lambda: "PENDING" in _output("squeue --noheader --format=%T", cluster), "the job is not pending")
    # SLURM delays a requeued job by two minutes
    until(lambda: not _output(f"scontrol update JobId={number} StartTime=now", cluster), "it cannot start at once")
    until(lambda: log.read_text().count("resumed from step") == 2, "it was not requeued")
    starts = re.findall(r"launch ([0-9a-f]{8})", log.read_text())
    assert (len(starts), len(set(starts)), len(first), len(first & set(starts))) == (4, 1, 1, 0)
    assert json.loads((folder / "launch.json").read_text())["launch"] == starts[0]
    assert "requeued 1 times" in state()
    in_process("launch", "down", "small", "--yes", *away, **values)
    until(lambda: not mentioning(str(tmp_path / "runs")), "processes were left")
    until(lambda: "small" not in _output("squeue", cluster), "the job stays in the queue")
    assert not (folder / "launch.json").exists()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if canary.encode() in path.read_bytes()]


@pytest.mark.slurm
@pytest.mark.nightly
def test_a_drill_ends_a_process_and_a_node_and_measures_how_the_job_recovers(
    dtrain: Dtrain, tmp_path: Path, cluster: dict[str, str]
) -> None:
    drill = ("verify", recipe(tmp_path), "--on", "slurm", "steps=2000", "checkpoint.every=50", "--kills", "2", "--yes")
    done = dtrain(*drill, "--seed", "1", "--json", seconds=500, **cluster, MY_TOKEN="x")
    found = json.loads(done.stdout)
    assert (found["kept"], found["target"]) == (True, "slurm, 2 hosts")
    assert [one["by"] for one in found["recoveries"]] == ["its supervisor", "the scheduler"]
    assert all(re.search(r"dt[12] killed", one["what"]) for one in found["recoveries"])
    assert all(one["repeated"] - one["step"] % 50 in (0, 50) for one in found["recoveries"])  # 50 if during a save


@pytest.mark.slurm
@pytest.mark.slow
def test_refusals_of_slurm_are_shown_before_anything_is_created(
    in_process: Dtrain, tmp_path: Path, cluster: dict[str, str]
) -> None:
    failed = in_process("launch", "up", recipe(tmp_path), "launch.partition=nix", code=3, **cluster)
    assert "2 problems" in failed.stderr
    assert "not set here: MY_TOKEN" in failed.stderr
    assert "invalid partition specified: nix" in failed.stderr
    assert not (tmp_path / "runs").exists()
    # SLURM does not distinguish a request that is too large from drained nodes: both jobs stay pending
    large = ["launch.nodes=8", "launch.devices=8", "--yes", "-d"]
    many = in_process("launch", "up", recipe(tmp_path), *large, **cluster, MY_TOKEN="x")
    assert "no node can take the job now: sbatch --test-only failed" in many.stderr
    in_process("launch", "stop", "small", **cluster)
    assert "cancelled" in in_process("launch", "status", "small", **cluster).stdout


def test_missing_slurm_is_reported(in_process: Dtrain, tmp_path: Path) -> None:
    missing = in_process("launch", "up", recipe(tmp_path), "--yes", code=3, PATH="/nowhere", MY_TOKEN="x")
    assert "sbatch is not installed here" in missing.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_folder_that_cannot_be_written_is_refused(in_process: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "sbatch").chmod(0o755)
    values = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MY_TOKEN": "x"}
    refusal = in_process("launch", "up", recipe(tmp_path), "--yes", "--runs-dir", "laptop", code=3, **values)
    assert f"cannot write to {tmp_path}/runs/small/launch" in refusal.stderr
    assert (tmp_path / "asked").read_text() == "--test-only\n"
    assert not (tmp_path / "laptop").exists()


def test_an_interrupted_launch_shows_how_to_find_its_job() -> None:
    with pytest.raises(RecipeError, match="whether sbatch accepted small is not known"):
        Slurm().status(LaunchJob("small", "steps: 1", handle={"folder": "/runs/small/launch"}))


def test_a_second_launch_does_not_keep_the_job_number_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([JobState("COMPLETED", code=0), JobState("RUNNING")])
    monkeypatch.setattr(Slurm, "_state", lambda *_: next(states))
    job = LaunchJob("small", "steps: 1", handle={"id": "17", "folder": "/runs/small/launch"})
    assert Slurm().start_handle(job) == {}
    with pytest.raises(Locked, match="in the queue as job 17"):
        Slurm().start_handle(job)


def test_the_folder_of_a_launch_stays_where_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = LaunchJob("small", "steps: 1", handle={"id": "7", "folder": str(tmp_path / "small" / "launch")})
    (tmp_path / "small" / "launch").mkdir(parents=True)
    (tmp_path / "small" / "launch" / "log.txt").write_text("0: hello\n")
    monkeypatch.chdir("/")
    assert list(Slurm().logs(job, None, follow=False)) == [("0", "hello")]


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("JobState=RUNNING ExitCode=0:0 Restarts=0 RunTime=1-00:00:05 NodeList=a", ("RUNNING", "a", None, 86405)),
        ("JobState=COMPLETED ExitCode=0:0 Restarts=2 RunTime=00:00:05 NodeList=a", ("COMPLETED", "a", 0, None)),
        ("JobState=FAILED ExitCode=7:0 Restarts=0 RunTime=00:00:05 NodeList=(null)", ("FAILED", "", 7, 5)),
        ("JobState=CANCELLED ExitCode=0:15 Restarts=0 RunTime=00:00:00", ("CANCELLED", "", 143, 0)),
        ("JobState=NODE_FAIL ExitCode=0:0 Restarts=0 RunTime=00:00:00", ("NODE_FAIL", "", 70, 0)),
    ],
)
def test_output_of_scontrol_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, expected: tuple[str, str, int | None, float | None]
) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho 'JobId=7 {printed}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = job_state("7")
    assert found
    assert (found.state, found.nodes, found.code, found.seconds) == expected


@pytest.mark.parametrize(
    ("code", "state", "word"), [(0, "stopped", "stopped"), (75, "stopped", "stopped"), (0, "finished", "completed")]
)
def test_a_run_that_exited_on_request_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, state: str, word: str
) -> None:
    ended = "COMPLETED" if code == 0 else "FAILED"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho 'JobState={ended} ExitCode={code}:0 Restarts=0'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "small" / "launch").mkdir(parents=True)
    (tmp_path / "small" / "run.json").write_text(json.dumps({"state": state, "step": 3, "steps": 9, "exit_code": code}))
    row = Slurm().status(LaunchJob("small", "", handle={"id": "7", "folder": str(tmp_path / "small" / "launch")}))[0]
    assert (row.state, row.code) == (word, code)


@pytest.mark.parametrize("field", ["partition", "account", "qos", "constraint", "memory", "time"])
@pytest.mark.parametrize("value", ["a\\n#SBATCH --wrap=id", "a b", "$(id)", "-x", "a;b", "`id`"])
def test_a_directive_cannot_be_injected(tmp_path: Path, field: str, value: str) -> None:
    assert f"launch.{field}" in refused(tmp_path, f'{{kind: slurm, {field}: "{value}"}}')


@pytest.mark.parametrize(
    ("time", "values"),
    [("2", "is not longer than grace = 120"), ("00:02:00", "is not longer than"), ("soon", "is not a time")],
)
def test_a_time_limit_too_short_to_save_is_refused(tmp_path: Path, time: str, values: str) -> None:
    assert values in refused(tmp_path, f'{{kind: slurm, time: "{time}"}}')


def test_the_limits_of_one_start_and_of_all_are_shown() -> None:
    job = LaunchJob("small", "steps: 1", "0a1b2c3d")
    (note,) = Slurm(time="24:00:00", runs="/runs").plan(job).notes
    assert "limits each start" in note
    bounded = Slurm(time="24:00:00", hours=72.0, runs="/runs").plan(job)
    assert (bounded.notes, bounded.hours) == ((), 72)
    script = bounded.files["job.sbatch"]
    assert "--hours 72" in script
    assert "#SBATCH --export=PATH,HOME,USER,LANG,DTRAIN_LAUNCH=0a1b2c3d\n" in script


@pytest.mark.parametrize(("time", "seconds"), [("3", 180), ("1:30", 90), ("24:00:00", 86400), ("2-12:00:00", 216000)])
def test_times_are_parsed_as_slurm_does(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


@pytest.mark.slow
def test_a_folder_that_bash_would_expand_is_refused(in_process: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "my $(id)").mkdir()
    path = tmp_path / "my $(id)" / "small.yaml"
    path.write_text(f"{RECIPE}launch: slurm\n")
    command = [sys.executable, "-m", "dtrain", "launch", "plan", "small.yaml"]
    done = subprocess.run(command, cwd=path.parent, env=bare_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "a path in SLURM's scripts may have only letters, digits" in done.stderr


def _job(tmp_path: Path, srun: str, command: str) -> Callable[..., tuple[int, bool]]:
    """Run the script with fake SLURM commands that record their arguments; its exit code, and whether the job was
    requeued."""
    folder = tmp_path / "runs" / "small" / "launch"
    folder.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name, does in {"srun": srun, "scancel": "exit 0", "scontrol": f'echo "$1" >> {tmp_path}/asked; echo a'}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    words = {"NAME": "small", "NODES": "1", "FOLDER": str(folder), "GRACE": "120", "EXPORT": "PATH"}
    script = fill_template("slurm.sbatch", words | {"DIRECTIVES": "", "COMMAND": command, "PROCESS": PROCESS})
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_NNODES": "1", "SLURM_NTASKS": "1"}
    values = bare_environment() | job | {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_PROCID": "0"}

    def start(**environment: str) -> tuple[int, bool]:
        (tmp_path / "asked").write_text("")
        code = subprocess.run(
            ["bash"], input=script, env=values | environment, text=True, capture_output=True, check=False
        ).returncode
        return code, "requeue" in (tmp_path / "asked").read_text()

    return start


@pytest.mark.parametrize(
    ("code", "requeued"),
    [
        *((one, True) for one in ("75", "137", "143")),
        *((str(code), False) for code in (0, *range(2, 10), 70, 127, 130)),
    ],
)
def test_a_preempted_job_is_requeued_unless_a_stop_is_requested(tmp_path: Path, code: str, requeued: bool) -> None:
    start = _job(tmp_path, f"exit {code}", "true")
    assert start() == (int(code), requeued)
    (tmp_path / "runs" / "small" / "stop").touch()
    assert start() == (75, False)


@pytest.mark.nightly
def test_a_job_that_saves_nothing_new_is_not_requeued_for_ever(tmp_path: Path) -> None:
    """The count is in the run folder, under the id of the launch, which stays the same after a requeue."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    srun = 'while [[ "$1" == --* ]]; do shift; done; exec "$@"'
    run = f"{sys.executable} -m dtrain run {tmp_path}/small.yaml --runs-dir {tmp_path}/runs --restarts 1"
    start = _job(tmp_path, srun, run)
    launch = {"DTRAIN_FAULT": "term@compile", "DTRAIN_LAUNCH": "first"}
    assert [start(**launch) for _ in range(3)] == [(75, True), (75, True), (8, False)]
    assert start(DTRAIN_LAUNCH="second") == (0, False)


def test_the_script_is_one_that_bash_reads(golden: Callable[[str, str], None]) -> None:
    words = {"NAME": "small", "NODES": "2", "FOLDER": "/runs/small/launch", "GRACE": "120", "EXPORT": "PATH,HOME"}
    script = fill_template(
        "slurm.sbatch",
        words | {"DIRECTIVES": "#SBATCH --partition=main", "COMMAND": "dtrain run x.yaml", "PROCESS": PROCESS},
    )
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    golden("launch_slurm.sbatch", script)
