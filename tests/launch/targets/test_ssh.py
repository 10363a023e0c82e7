"""Runs over real sshd, each host in its own network namespace: disconnected, killed, detached, stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dtrain.checkpoint import manifest
from tests.conftest import PACED, SHARED, Dtrain, alone, bare_environment
from tests.launch.processes import mentioning, youngest

pytestmark = pytest.mark.slow

KIT = SHARED / "kits" / "ssh_hosts"
HOSTS = 4
RECIPE = """
name: far
model: {kind: mlp, sizes: [64, 32, 10]}
data: digits
optimizer: {kind: adamw, lr: 1e-3}
batch: 64
steps: 600
evaluate: {every: 0}
checkpoint: {every: 50, keep: 3}
track: {every: 5}
"""
LAUNCH = """
launch:
  kind: ssh
  hosts: [{hosts}]
  runs: {folder}/runs
  folder: {folder}/host
  python: {python}
  identity: {keys}/id
  known_hosts: {keys}/known
  devices: {devices}
  environment: [XDG_CACHE_HOME, DTRAIN_FAULT]
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Four hosts with sshd; the folder with the ssh key for them."""
    if not KIT.is_dir():
        pytest.skip("the simulated hosts are not in the shared folder next to this checkout")
    if os.geteuid() or not all(map(shutil.which, ("ip", "ssh", "/usr/sbin/sshd"))):
        pytest.skip("the simulated hosts need root, iproute2 and openssh-server")
    with alone("ssh"):
        yield from _hosts(tmp_path_factory.mktemp("hosts"))


def _hosts(folder: Path) -> Iterator[Path]:
    def up() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", KIT / "up.sh", str(HOSTS), folder], capture_output=True, text=True, check=False)

    made = up()
    if made.returncode:  # a test run that was killed left its hosts behind
        subprocess.run(["bash", KIT / "down.sh", folder], capture_output=True, check=False)
        made = up()
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.splitlines()[-1:]}")
    try:
        addresses = [f"10.99.0.{11 + i}" for i in range(HOSTS)]
        scanned = subprocess.run(["ssh-keyscan", "-t", "ed25519", *addresses], capture_output=True, check=True)
        known = [line.split(maxsplit=1) for line in scanned.stdout.decode().splitlines() if not line.startswith("#")]
        lines = [f"{address},dt-w{addresses.index(address)} {key}\n" for address, key in known]
        (folder / "known").write_text("".join(lines))
        yield folder
    finally:
        subprocess.run(["bash", KIT / "down.sh", folder], capture_output=True, check=False)


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DTRAIN_FAULT", PACED["DTRAIN_FAULT"])
    yield
    for pid in mentioning(f"{tmp_path}/host"):
        os.kill(pid, signal.SIGKILL)


def recipe(tmp_path: Path, keys: Path, hosts: int) -> Path:
    names = ", ".join(f"root@10.99.0.{11 + i}" for i in range(hosts))
    filled = LAUNCH.format(hosts=names, folder=tmp_path, python=sys.executable, keys=keys, devices=4)
    (tmp_path / "far.yaml").write_text(RECIPE + filled)
    return tmp_path / "far.yaml"


def following(tmp_path: Path, *arguments: str, pace: str = PACED["DTRAIN_FAULT"]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dtrain", "launch", *arguments]
    return subprocess.Popen(
        command, cwd=tmp_path, env=bare_environment() | {"DTRAIN_FAULT": pace},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def read_until(listener: subprocess.Popen[str], pattern: str, seconds: float = 200) -> str:
    """The output up to and including the first line that matches."""
    output, end = "", time.monotonic() + seconds
    assert listener.stdout
    for line in listener.stdout:
        output += line
        if re.search(pattern, line):
            return output
        assert time.monotonic() < end, output
    raise AssertionError(f"no line matches {pattern!r}:\n{output}")


def checksum(tmp_path: Path, name: str, step: int = 600) -> list[int]:
    return list(manifest.read(tmp_path / "runs" / name / "checkpoints" / str(step)).checksum)


@pytest.mark.nightly
def test_a_run_disconnected_killed_and_detached_ends_with_the_same_bits(
    dtrain: Dtrain, tmp_path: Path, keys: Path
) -> None:
    up = following(tmp_path, "up", str(recipe(tmp_path, keys, 2)), "--yes")
    read_until(up, r"10\.99\.0\.11\] step 80/")
    subprocess.run(["ip", "link", "set", "v2", "down"], check=True)
    read_until(up, r"10\.99\.0\.12\] -- not connected")
    read_until(up, r"10\.99\.0\.11\] restarting from step")
    subprocess.run(["ip", "link", "set", "v2", "up"], check=True)
    output = read_until(up, r"10\.99\.0\.11\] resumed from step")
    assert "Check failure stack trace" not in output
    up.send_signal(signal.SIGINT)  # the laptop disconnects
    assert "far continues; to follow it again: dtrain launch logs far -f" in up.communicate(timeout=200)[0]
    workers = mentioning(f"dtrain run {tmp_path}/host/far/dt-w0/recipe.yaml")
    os.kill(youngest(workers), signal.SIGKILL)
    back = following(tmp_path, "logs", "far", "-f")
    output = read_until(back, r"10\.99\.0\.11\] -- ended: exit code 0", 200)
    assert "process 0 ended first: killed by SIGKILL" in output
    back.communicate(timeout=200)
    assert back.returncode == 0
    assert not mentioning(f"{tmp_path}/host")
    dtrain("run", tmp_path / "far.yaml", "name=straight", "--devices", "4", "--processes", "2")
    assert checksum(tmp_path, "far") == checksum(tmp_path, "straight")


@pytest.mark.nightly
def test_a_host_that_lost_its_processes_joins_again_by_up(dtrain: Dtrain, tmp_path: Path, keys: Path) -> None:
    path = recipe(tmp_path, keys, 2)
    section = path.read_text().split("launch:")[1]
    path.write_text(path.read_text().split("launch:")[0])
    launch = [f"launch.{line.strip().replace(': ', '=', 1)}" for line in section.strip().splitlines()]
    dtrain("launch", "up", path, *launch, "--yes", "--detach", DTRAIN_FAULT=",".join([PACED["DTRAIN_FAULT"]] * 4))
    end = time.monotonic() + 100
    while not re.search(r"after step [1-9]", dtrain("launch", "status", "far").stdout):
        assert time.monotonic() < end
    for word in ('"rank": 1', "dt-w1"):  # the runner first, else it would record how the run ended
        for pid in mentioning(f"{tmp_path}/host"):
            with suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
    lost = dtrain("launch", "status", "far").stdout
    assert "root@10.99.0.12  lost      its runner died without an exit code" in lost
    other = ("--runs-dir", tmp_path / "other")  # from another machine, with what `up` was given
    assert "  lost  " in dtrain("launch", "status", path, *launch, *other).stdout
    again = following(tmp_path, "up", str(path), *launch, "--yes")
    shown = read_until(again, r"ended: exit code 0")
    assert (
        "the run was lost on root@10.99.0.12 and is alive elsewhere: it is started there, to join the others" in shown
    )
    again.communicate(timeout=200)
    assert again.returncode == 0
    dtrain("run", path, "name=straight", "--devices", "4", "--processes", "2")
    assert checksum(tmp_path, "far") == checksum(tmp_path, "straight")


@pytest.mark.nightly
def test_a_drill_ends_a_process_and_a_host_and_measures_how_the_run_recovers(
    dtrain: Dtrain, tmp_path: Path, keys: Path
) -> None:
    path = recipe(tmp_path, keys, 2)
    slow = ",".join([PACED["DTRAIN_FAULT"]] * 4)
    drill = ("verify", path, "--on", "ssh", "steps=300", "checkpoint.every=40", "--kills", "2", "--seed", "2", "--yes")
    found = json.loads(dtrain(*drill, "--json", seconds=300, DTRAIN_FAULT=slow).stdout)
    assert (found["kept"], found["target"]) == (True, "ssh, 2 hosts")
    assert [one["by"] for one in found["recoveries"]] == ["its supervisor", "`dtrain launch up`"]
    assert all(re.search(r"root@10\.99\.0\.1[12] killed", one["what"]) for one in found["recoveries"])
    assert all(one["repeated"] - one["step"] % 40 in (0, 40) for one in found["recoveries"])  # 40 if during a save
    assert not mentioning(f"{tmp_path}/host")


@pytest.mark.nightly
def test_an_error_on_one_host_ends_the_run_on_all(in_process: Dtrain, tmp_path: Path, keys: Path) -> None:
    path = recipe(tmp_path, keys, 2)
    failed = in_process(
        "launch",
        "up",
        path,
        "--yes",
        "optimizer={kind: adamw, lr: 1e4, decay: 0.9}",
        "guard.not_finite=stop",
        code=7,
    )
    assert failed.stdout.count("-- ended: exit code 7") == 2
    assert not mentioning(f"{tmp_path}/host")


def test_four_hosts_stop_and_leave_no_process(in_process: Dtrain, tmp_path: Path, keys: Path) -> None:
    path = recipe(tmp_path, keys, 4)
    up = following(tmp_path, "up", str(path), "--yes", "steps=100000")
    read_until(up, r"step 5/")
    assert len(mentioning(f"{tmp_path}/host")) == 4 * 3  # runner, supervisor, worker
    stopped = in_process("launch", "stop", "far")
    assert stopped.stderr.count(": stopped step") == 4
    up.communicate(timeout=200)
    assert up.returncode == 0
    assert not mentioning(f"{tmp_path}/host")
    alone = in_process("launch", "logs", "far", "--host", "2").stdout
    assert set(re.findall(r"^\[(.*?)\]", alone, re.MULTILINE)) == {"root@10.99.0.13"}
    in_process("launch", "down", "far", "--yes")
    assert not (tmp_path / "host" / "far").exists()


@pytest.mark.nightly
def test_hosts_behind_a_proxy_are_waited_for_and_found_from_another_machine(
    dtrain: Dtrain, tmp_path: Path, keys: Path
) -> None:
    path = recipe(tmp_path, keys, 4)
    text = re.sub(r"hosts: \[.*\]", "hosts: [root@dt-w0, root@dt-w1, root@dt-w2, root@dt-w3]", path.read_text())
    jump = f"ssh -i {keys}/id -o UserKnownHostsFile={keys}/known -o BatchMode=yes -W %h:22 root@10.99.0.12"
    addresses = "[10.99.0.11, 10.99.0.12, 10.99.0.13, 10.99.0.14]"
    text = text.replace("steps: 600", "steps: 500")
    path.write_text(f"{text}  addresses: {addresses}\n  proxy: {jump}\n  ready: {tmp_path}/ready\n")
    laptop, other = ("--runs-dir", tmp_path / "laptop"), ("--runs-dir", tmp_path / "other")
    assert "no run 'far' was found" in dtrain("launch", "status", path, *other, code=2).stderr
    slow = ",".join([PACED["DTRAIN_FAULT"]] * 4)  # it must not end before it is stopped
    up = following(tmp_path, "up", str(path), "--yes", *map(str, laptop), pace=slow)
    shown = read_until(
        up, r"waiting for 4 of 4 hosts without .*/ready: root@dt-w0, root@dt-w1, root@dt-w2, root@dt-w3$"
    )
    assert f"shell command run here for each connection: {jump}" in shown
    (tmp_path / "ready").touch()
    read_until(up, r"root@dt-w0\] step 5/")
    assert len(mentioning("-W dt-w")) == 4
    subprocess.run(["ip", "link", "set", "v2", "down"], check=True)  # the host that forwards all connections
    read_until(up, r"-- not connected")
    subprocess.run(["ip", "link", "set", "v2", "up"], check=True)
    read_until(up, r"-- reconnected")
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=200)
    assert not mentioning(f"{keys}/id")
    record = json.loads((tmp_path / "runs" / "far" / "launch.json").read_text())
    assert record["launch"] == json.loads((tmp_path / "laptop" / "far" / "launch.json").read_text())["launch"]
    assert dtrain("launch", "status", path, *other).stdout.count("  running  ") == 4
    stopped = dtrain("launch", "stop", path, *other)
    assert stopped.stderr.count(": stopped step") == 4
    assert (tmp_path / "runs" / "far" / "stop").exists()
    assert "step" in dtrain("launch", "logs", path, *other).stdout
    finished = dtrain("launch", "up", path, "--yes", *laptop, DTRAIN_FAULT="pace@no-point")
    assert finished.stdout.count("-- ended: exit code 0") == 4
    dtrain("launch", "down", path, "--yes", *other)
    assert dtrain("launch", "status", path, *other).stdout.count("  ended     exit code 0") == 4
    assert not mentioning(f"{keys}/id")
    dtrain("run", path, "name=straight", "--devices", "4", "--processes", "4")
    assert checksum(tmp_path, "far", 500) == checksum(tmp_path, "straight", 500)


@pytest.mark.nightly
def test_problems_of_a_host_are_reported_with_its_name(in_process: Dtrain, tmp_path: Path, keys: Path) -> None:
    path = recipe(tmp_path, keys, 2)
    nobody = in_process("launch", "up", path, "--yes", "launch.hosts=[root@10.99.0.11, root@10.99.0.77]", code=3)
    assert "root@10.99.0.77: " in nobody.stderr
    bare = in_process("launch", "up", path, "--yes", "launch.python=/usr/bin/python3", code=3)
    assert "root@10.99.0.12: dtrain is not installed for /usr/bin/python3 on that host" in bare.stderr
    stranger = in_process("launch", "up", path, "--yes", "launch.known_hosts=/dev/null", code=3)
    assert "Host key verification failed" in stranger.stderr
    apart = in_process("launch", "up", path, "--yes", "launch.runs=/proc/self/fd/apart", code=3)
    assert "root@10.99.0.11: cannot write to /proc/self/fd/apart" in apart.stderr
    assert not mentioning(f"{tmp_path}/host")
