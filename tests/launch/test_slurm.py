"""Jobs on a real SLURM of four nodes, all of them on this machine."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from dtrain.folder import saved_steps
from dtrain.launch.slurm import _seconds
from dtrain.launch.templates import filled
from tests.conftest import SHARED, Dtrain, alone, bare_environment
from tests.launch.processes import mentioning
from tests.launch.test_names import RECIPE, refused

KIT = SHARED / "kits" / "slurm"
NODES = 4
pytestmark = [pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which sbatch finds it."""
    if not KIT.is_dir():
        pytest.skip("the stand-in for a cluster is not beside this checkout")
    if os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "unshare"))):
        pytest.skip("a cluster of our own needs root, slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    told = {"SLURM_CONF": str(folder / "slurm.conf")}
    with alone("slurm"), (folder / "said").open("w") as said:
        yield from _cluster(folder, told, said)


def _cluster(folder: Path, told: dict[str, str], said: IO[str]) -> Iterator[dict[str, str]]:
    up = subprocess.Popen(["bash", KIT / "up.sh", str(NODES), folder], stdout=said, stderr=said)
    try:
        _until(lambda: "idle" in _said("sinfo", told), "the cluster did not come up")
        yield told
    finally:
        for path in folder.glob("*.pid"):
            subprocess.run(["kill", "-9", path.read_text().strip()], check=False, capture_output=True)
        up.kill()
        up.wait()


def _said(command: str, told: dict[str, str]) -> str:
    done = subprocess.run(command.split(), env=os.environ | told, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def _until(done: Callable[[], bool], failure: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, failure
        time.sleep(0.5)


def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    section = f"{{kind: slurm, nodes: 2, python: {sys.executable}, devices: 4, environment: [MY_TOKEN]}}"
    path.write_text(f"{RECIPE}track: {{every: 50}}\ncheckpoint: {{every: 50}}\nlaunch: {section}\n")
    return path


@pytest.mark.slurm
@pytest.mark.slow
def test_a_job_on_two_nodes_stops_is_taken_up_again_and_cancelled(
    dtrain: Dtrain, tmp_path: Path, cluster: dict[str, str]
) -> None:
    canary = "canary-0a1b2c3d4e5f6071"
    told = cluster | {"MY_TOKEN": canary}
    state = lambda: dtrain("launch", "status", "small", **told).stdout  # noqa: E731
    dtrain("launch", "up", recipe(tmp_path), "--yes", "-d", "steps=1000000", **told)
    again = dtrain("launch", "up", recipe(tmp_path), "--yes", code=6, **told)
    assert re.search(r"small is in the queue as job \d+", again.stderr)
    _until(lambda: saved_steps(tmp_path / "runs" / "small" / "checkpoints") != [], "no step was saved")
    assert re.search(r"running   dt\[1-2\], step \d+/1000000 saved", state())
    dtrain("launch", "stop", "small", **told)
    assert re.search(r"job \d+  stopped   dt\[1-2\], step \d+/1000000 saved", state())
    said = dtrain("launch", "logs", "small", **told).stdout
    assert "[0] compiled in" in said
    assert "[job] == exit code 75" in said
    assert "[0]" not in dtrain("launch", "logs", "small", "--host", "1", **told).stdout
    dtrain("launch", "up", recipe(tmp_path), "--yes", "-d", "steps=1000000", **told)
    log = tmp_path / "runs" / "small" / "launch" / "log.txt"
    _until(lambda: log.exists() and "resumed from step" in log.read_text(), "it was not taken up")
    number = re.findall(r"job (\d+)", state())[0]
    _said(f"scontrol requeue {number}", cluster)
    _until(lambda: "PENDING" in _said("squeue --noheader --format=%T", cluster), "it does not wait to start again")
    # SLURM puts what it requeues off for two minutes
    _until(lambda: not _said(f"scontrol update JobId={number} StartTime=now", cluster), "it cannot start at once")
    _until(lambda: log.read_text().count("resumed from step") == 2, "it was not requeued")
    assert "requeued 1 times" in state()
    dtrain("launch", "down", "small", "--yes", **told)
    _until(lambda: not mentioning(str(tmp_path / "runs")), "processes were left")
    _until(lambda: "small" not in _said("squeue", cluster), "the job stays in the queue")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if canary.encode() in path.read_bytes()]


@pytest.mark.slurm
@pytest.mark.slow
def test_what_slurm_refuses_is_told_in_its_words(dtrain: Dtrain, tmp_path: Path, cluster: dict[str, str]) -> None:
    failed = dtrain("launch", "up", recipe(tmp_path), "--yes", "launch.partition=nix", code=3, **cluster, MY_TOKEN="x")
    assert "sbatch" in failed.stderr
    assert "invalid partition specified: nix" in failed.stderr
    assert not (tmp_path / "runs" / "small" / "launch.json").exists()


def test_where_there_is_no_slurm_it_says_so(dtrain: Dtrain, tmp_path: Path) -> None:
    missing = dtrain("launch", "up", recipe(tmp_path), "--yes", code=3, PATH="/nowhere", MY_TOKEN="x")
    assert "sbatch is not installed here" in missing.stderr


@pytest.mark.parametrize("field", ["partition", "account", "qos", "constraint", "memory", "time"])
@pytest.mark.parametrize("value", ["a\\n#SBATCH --wrap=id", "a b", "$(id)", "-x", "a;b", "`id`"])
def test_a_directive_cannot_be_smuggled_in(tmp_path: Path, field: str, value: str) -> None:
    assert f"launch.{field}" in refused(tmp_path, f'{{kind: slurm, {field}: "{value}"}}')


@pytest.mark.parametrize(
    ("time", "told"),
    [("2", "leaves nothing beside grace = 120"), ("00:02:00", "leaves nothing"), ("soon", "is no time")],
)
def test_a_time_in_which_nothing_could_be_saved_is_refused(tmp_path: Path, time: str, told: str) -> None:
    assert told in refused(tmp_path, f'{{kind: slurm, time: "{time}"}}')


@pytest.mark.parametrize(("time", "seconds"), [("3", 180), ("1:30", 90), ("24:00:00", 86400), ("2-12:00:00", 216000)])
def test_times_are_read_as_slurm_does(time: str, seconds: int) -> None:
    assert _seconds(time) == seconds


def test_a_folder_that_bash_would_read_otherwise_is_refused(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "my $(id)").mkdir()
    path = tmp_path / "my $(id)" / "small.yaml"
    path.write_text(f"{RECIPE}launch: slurm\n")
    command = [sys.executable, "-m", "dtrain", "launch", "plan", "small.yaml"]
    done = subprocess.run(command, cwd=path.parent, env=bare_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "SLURM's scripts take letters, digits" in done.stderr


def test_a_job_that_saves_nothing_new_is_not_requeued_for_ever(tmp_path: Path) -> None:
    """The script itself, with commands of SLURM's names that note how they were called."""
    folder = tmp_path / "run" / "launch"
    folder.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    saves = f"[ -e {tmp_path}/saves ] && mkdir -p {folder.parent}/checkpoints/10; exit 75"
    for name, does in {"srun": saves, "scancel": "exit 0", "scontrol": f'echo "$1" >> {tmp_path}/asked'}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    words = {"NAME": "small", "NODES": "1", "FOLDER": str(folder), "GRACE": "120", "EXPORT": "PATH"}
    script = filled("slurm.sbatch", words | {"DIRECTIVES": "", "COMMAND": "true"})
    told = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a",
        "SLURM_NNODES": "1",
    }

    def start() -> tuple[int, bool]:
        (tmp_path / "asked").write_text("")
        code = subprocess.run(["bash"], input=script, env=told, text=True, capture_output=True, check=False).returncode
        return code, "requeue" in (tmp_path / "asked").read_text()

    assert start() == (75, True)
    assert start() == (75, True)
    (tmp_path / "saves").touch()
    assert [start() for _ in range(3)] == [(75, True)] * 3  # the first of them saved, and is counted from
    assert start() == (8, False)
    (folder / "stuck").unlink()
    (folder / "stop").touch()
    assert start() == (75, False)


def test_the_script_is_one_that_bash_reads(golden: Callable[[str, str], None]) -> None:
    words = {"NAME": "small", "NODES": "2", "FOLDER": "/runs/small/launch", "GRACE": "120", "EXPORT": "PATH,HOME"}
    script = filled("slurm.sbatch", words | {"DIRECTIVES": "#SBATCH --partition=main", "COMMAND": "dtrain run x.yaml"})
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    golden("launch_slurm.sbatch", script)
