"""Connections to many hosts, with a fake ssh that counts them: no host is needed."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtrain.core.errors import EnvironmentFault, LeftBehind
from dtrain.core.lease import start_time
from dtrain.launch.fanout import Connections, Machine
from dtrain.launch.job import LaunchJob
from dtrain.launch.runner import RunnerDir
from dtrain.launch.targets.ssh import Ssh
from dtrain.launch.wire import HostJob, ProcessFile, Request, encode
from tests.conftest import bare_environment
from tests.launch.processes import mentioning
from tests.waiting import until

SSH = """#!{python} -SE
# one connection: counts the open connections, waits like a network, and replies like an agent
import json, os, pathlib, sys, time

here, host = pathlib.Path(__file__).parent, sys.argv[-2]
(here / "open" / str(os.getpid())).touch()
alive = [pid for pid in os.listdir(here / "open") if os.path.exists("/proc/" + pid)]
with open(here / "log", "a") as log:
    log.write(f"{{host}} {{len(alive)}}\\n")
time.sleep(0.1)
answers = json.loads((here / "answers").read_text())
for line in sys.stdin:
    request = json.loads(line)
    verb, rank = request["value"]["verb"], request["value"]["job"]["rank"]
    problem = answers.get(f"{{verb}} {{host}}", "")
    if problem == "hang":
        time.sleep(1000)
    marks = range(request["value"]["job"]["world_size"]) if verb == "folder_markers" else ()
    value = {{"problem": problem, "time": time.time(), "ready": not problem, "setup": "", "versions": {{}},
             "problems": [], "items": list(marks), "alive": False, "recipe": "", "code": 0, "state": "finished",
             "recorded": False, "text": None, "offset": None, "heartbeat": None}}
    print(json.dumps(request | {{"type": "Reply", "value": value}}), flush=True)
"""


class StandIn:
    """The replies of hosts, and the connections that were opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "open").mkdir(parents=True)
        (folder / "answers").write_text("{}")
        (folder / "ssh").write_text(SSH.format(python=sys.executable))
        (folder / "ssh").chmod(0o755)

    def connections(self) -> tuple[Counter[str], int]:
        """The number of connections per host, and the maximum at a time, since the last call."""
        lines = [line.split() for line in (self.folder / "log").read_text().splitlines()]
        (self.folder / "log").unlink()
        return Counter(host for host, _ in lines), max(int(count) for _, count in lines)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    return found


def target(hosts: int, **more: object) -> Ssh:
    return Ssh(hosts=tuple(f"host{rank}" for rank in range(hosts)), connections=4, **more)  # type: ignore[arg-type]


def test_one_connection_per_host_serves_all_requests(stand_in: StandIn) -> None:
    target(4).up(LaunchJob("far", ""), print)
    made, most = stand_in.connections()
    assert set(made.values()) == {1}
    assert most <= 4


@pytest.mark.slow
def test_never_more_connections_than_the_limit(stand_in: StandIn) -> None:
    far = target(12)
    far.up(LaunchJob("far", ""), print)
    made, most = stand_in.connections()
    assert made.pop("host0") == 3  # one each to look, to count the markers and to start
    assert set(made.values()) == {2}
    assert most <= 4
    assert [row.state for row in far.status(LaunchJob("far", ""))] == ["ended"] * 12
    made, most = stand_in.connections()
    assert (set(made.values()), most <= 4) == ({1}, True)
    assert sorted(name for name, _ in far.logs(LaunchJob("far", ""), None, True)) == sorted(far.hosts)
    made, most = stand_in.connections()
    assert (set(made.values()), most <= 4) == ({1}, True)


def test_if_one_host_does_not_start_none_is_left_running(stand_in: StandIn) -> None:
    (stand_in.folder / "answers").write_text('{"start host2": "no space left"}')
    with pytest.raises(EnvironmentFault, match="host2: no space left") as caught:
        target(4).up(LaunchJob("far", ""), print)
    assert caught.value.hint == "nothing was left running"
    (stand_in.folder / "answers").write_text('{"start host2": "no space left", "kill host1": "lost"}')
    with pytest.raises(LeftBehind) as left:
        target(4).up(LaunchJob("far", ""), print)
    assert left.value.hint == "it may be running on host1"


def test_hosts_that_are_not_set_up_are_waited_for(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def settled(_seconds: float) -> None:
        (stand_in.folder / "answers").write_text("{}")

    (stand_in.folder / "answers").write_text('{"preflight host1": "Connection refused"}')
    # the module's clock alone: threads that earlier tests left call time.sleep as well
    monkeypatch.setattr("dtrain.launch.targets.ssh.time", SimpleNamespace(monotonic=time.monotonic, sleep=settled))
    far = target(3, ready="/run/ready")
    far.up(LaunchJob("far", ""), lines.append)
    assert lines == ["waiting for 1 of 3 hosts without /run/ready: host1 (host1: Connection refused)"]
    assert stand_in.connections()[0] == {"host0": 1, "host1": 2, "host2": 1}
    (stand_in.folder / "answers").write_text('{"preflight host1": "Connection refused"}')
    with pytest.raises(EnvironmentFault, match=r"after 1e-05 minutes 1 of 3 hosts without /run/ready: host1 \(host1: "):
        target(3, ready="/run/ready", ready_minutes=1e-5).up(LaunchJob("far", ""), lines.append)


def test_a_proxy_command_is_one_argument_and_is_shown() -> None:
    far = Ssh(hosts=("ada@vm-0", "ada@vm-1"), addresses=("10.0.0.2", "10.0.0.3"), proxy="nc -X 5 %h 22; true")
    command = far.plan(LaunchJob("far", "")).commands[1]
    assert command[command.index("ProxyCommand=nc -X 5 %h 22; true") - 1] == "-o"
    assert command[-2] == "ada@vm-1"
    assert far.coordinator() == "10.0.0.2:8476"
    assert "shell command run here for each connection: nc -X 5 %h 22; true" in far.describe()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_ctrl_c_leaves_no_process(stand_in: StandIn) -> None:
    (stand_in.folder / "answers").write_text('{"status host1": "hang", "status host5": "hang"}')
    code = "from dtrain.launch.targets.ssh import Ssh; from dtrain.launch.job import LaunchJob\n"
    code += f"Ssh(hosts={tuple(f'host{rank}' for rank in range(9))!r}, connections=4).status(LaunchJob('far', ''))"
    asking = subprocess.Popen([sys.executable, "-c", code], env=bare_environment(), stderr=subprocess.PIPE, text=True)
    log = stand_in.folder / "log"
    until(lambda: log.exists() and len(log.read_text().splitlines()) >= 9)
    assert mentioning(f"{stand_in.folder}/ssh")
    asking.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in asking.communicate(timeout=200)[1]
    assert not mentioning(f"{stand_in.folder}/ssh")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["status", "logs"])
def test_an_agent_exits_when_its_output_is_closed(tmp_path: Path, verb: str) -> None:
    job = HostJob(name="far", folder=str(tmp_path), runs=str(tmp_path / "runs"))
    RunnerDir(job).path.mkdir(parents=True)
    RunnerDir(job).write("runner", ProcessFile(os.getpid(), start_time(os.getpid())))  # a run that never ends
    RunnerDir(job).log.write_text("step 1\n")
    agent = subprocess.Popen(
        [sys.executable, "-m", "dtrain.launch.agent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdin
    assert agent.stdout
    agent.stdin.write(encode(Request(verb=verb, job=job, follow=True)) + "\n")  # type: ignore[arg-type]
    agent.stdin.flush()
    assert agent.stdout.readline()
    agent.stdin.close()
    assert agent.wait(timeout=200) == 0
    agent.stdout.close()


def test_a_broken_connection_is_opened_again(tmp_path: Path) -> None:
    job = HostJob(name="far", folder=str(tmp_path), runs=str(tmp_path / "runs"))
    with Connections([Machine(0, "here", (), sys.executable)], 1, job) as link:
        assert not link.ask("status")[0].reply.problem
        for pid in mentioning("dtrain.launch.agent"):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                os.kill(pid, signal.SIGKILL)
        assert link.ask("status")[0].reply.problem == "the connection was lost"
        assert not link.ask("status")[0].reply.problem
    missing = Connections([Machine(0, "here", (), "/no/python")], 1, job)
    assert missing.ask("status")[0].reply.problem == "/no/python: No such file or directory"
