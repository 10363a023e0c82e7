"""A run that lost a process or a host resumes from copies of its state in memory, with the same bits."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.checkpoint.copies import HEAD
from dtrain.core import heartbeat
from dtrain.core.run_dir import Folder, saved_steps
from tests.conftest import PACED, Dtrain, bare_environment
from tests.train.test_faults import recipe  # noqa: F401
from tests.train.test_run import numbers, saved
from tests.waiting import until

TWO = ("--devices", "4", "--processes", "2", "mesh={data: 2, fsdp: 2}")
RARELY = ("checkpoint.minutes=0", "steps=40", "evaluate.every=0", "track.every=1")


def often(tmp_path: Path) -> str:
    return f"checkpoint.memory={{every: 5, copies: 2, folder: {tmp_path}/memory}}"


@pytest.mark.slow
@pytest.mark.newest
def test_a_process_that_is_killed_costs_no_checkpoint_and_no_bit(
    dtrain: Dtrain,
    recipe: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    dtrain("run", recipe, *TWO, *RARELY, "name=straight")
    notes = tmp_path / "notes"
    notes.mkdir()
    faults = {"DTRAIN_FAULT": "kill@step:18/1,kill@step:33/0", "DTRAIN_FAULT_NOTES": str(notes)}
    done = dtrain("run", recipe, *TWO, *RARELY, often(tmp_path), **faults)
    assert re.findall(r"resumed from step (\d+), a copy in memory", done.stderr) == ["15", "30"]
    assert "restarting from step 0 or a newer copy" in done.stderr
    runs = tmp_path / "runs"
    assert saved_steps(runs / "small" / "checkpoints") == [40]
    assert saved(runs / "small", 40) == saved(runs / "straight", 40)
    assert numbers(runs / "small") == numbers(runs / "straight")
    assert list((tmp_path / "memory").glob("*/*")) == []  # removed with the end of the run


@pytest.mark.slow
def test_a_checkpoint_that_is_newer_than_the_copies_is_used(
    dtrain: Dtrain,
    recipe: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    faults = {"DTRAIN_FAULT": "sleep@step:8,kill@step:9", "DTRAIN_FAULT_NOTES": str(notes)}
    done = dtrain("run", recipe, *RARELY, "checkpoint.every=7", often(tmp_path), "--restarts", "1", **faults)
    assert "resumed from step 7 (" in done.stderr
    assert list((tmp_path / "memory").glob("*/*")) == []


@pytest.mark.slow
def test_copies_of_other_settings_are_not_used(
    dtrain: Dtrain,
    recipe: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    dtrain("run", recipe, *RARELY, often(tmp_path), code=-9, DTRAIN_FAULT="kill@step:18")
    assert list((tmp_path / "memory").glob("*/*/*/0/*"))
    other = dtrain("run", recipe, *RARELY, often(tmp_path), "optimizer.lr=0.01")
    assert "the copies in memory are of a run with other settings, and are not used" in other.stderr
    assert "resumed" not in other.stderr
    dtrain("run", recipe, *RARELY, "optimizer.lr=0.01", "name=straight")
    assert saved(tmp_path / "runs" / "small", 40) == saved(tmp_path / "runs" / "straight", 40)


class Host:
    """A supervisor with a name of its host of its own, as on another machine."""

    def __init__(self, tmp_path: Path, rank: int, address: str, *words: str) -> None:
        place = {"DTRAIN_RANK": str(rank), "DTRAIN_WORLD_SIZE": "2", "DTRAIN_COORDINATOR": address}
        command = [sys.executable, "-m", "dtrain", "run", "small.yaml", *words, "--restarts", "3"]
        (tmp_path / "hosts").write_text("127.0.0.1 localhost host-0 host-1\n")  # Gloo looks up its own name
        script = 'mount --bind hosts /etc/hosts && hostname "$0" && exec "$@"'
        named = ["unshare", "--uts", "--mount", "sh", "-c", script, f"host-{rank}", *command]
        self.output = tmp_path / f"host-{rank}.txt"
        with self.output.open("a") as file:
            self.process = subprocess.Popen(
                named, cwd=tmp_path, env=bare_environment() | PACED | place, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="names of hosts need root and unshare")
def test_a_host_that_is_lost_gets_its_part_back_from_another_one(
    dtrain: Dtrain,
    recipe: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = ("--devices", "4", "mesh={data: 1, fsdp: 4}", "checkpoint.minutes=0", "steps=200", "evaluate.every=0")
    words += ("track.every=10",)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"host-0:{probe.getsockname()[1]}"  # not the loopback address, whose processes have a supervisor
    dtrain("run", recipe, *words, "--processes", "2", "name=straight")
    hosts = [Host(tmp_path, rank, address, *words, often(tmp_path)) for rank in range(2)]
    try:
        run = Folder(tmp_path / "runs" / "small")
        until(lambda: (latest := heartbeat.read(run.heartbeat(0))) and latest.step > 30, "it does not train")
        os.killpg(hosts[1].process.pid, signal.SIGKILL)
        hosts[1].process.wait()
        (kept,) = (tmp_path / "memory").glob("*/*/*/1")
        newest, *others = sorted(kept.iterdir(), key=lambda step: -int(step.name))
        for step in others:
            shutil.rmtree(step)
        (newest / HEAD).unlink(missing_ok=True)
        for number in "01":  # as if it had been lost while it wrote
            os.truncate(newest / number, 100)
        hosts[1] = Host(tmp_path, 1, address, *words, often(tmp_path))  # the host that replaces it
        assert [host.process.wait(timeout=60) for host in hosts] == [0, 0], hosts[0].output.read_text()
    finally:
        for host in hosts:
            if host.process.poll() is None:
                os.killpg(host.process.pid, signal.SIGKILL)
    shown = hosts[0].output.read_text()
    assert re.search(r"resumed from step [1-9]\d*, a copy in memory", shown)
    assert "checkpoint.memory.copies: 1 on other hosts in place of 2, since there are 2 hosts" in shown
    assert saved_steps(run.checkpoints) == [200]
    assert saved(run.path, 200) == saved(tmp_path / "runs" / "straight", 200)
