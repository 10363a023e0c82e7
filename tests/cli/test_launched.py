"""Launched runs, as SLURM or Kubernetes start and stop them: on one host, and on two simulated on this machine."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dtrain.core import heartbeat
from dtrain.core.run_dir import saved_steps
from tests.conftest import PACED, Dtrain, bare_environment
from tests.train.test_run import RECIPE
from tests.waiting import until

LONG = ["steps=1000000", "evaluate.every=0", "track.every=1000"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


def started(folder: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    environment = (PACED if LONG[0] in options else {}) | environment
    return subprocess.Popen(
        [sys.executable, "-m", "dtrain", "run", "small.yaml", *options], cwd=folder,
        env=bare_environment() | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def trains(run: Path, step: int = 3, rank: int = 0) -> None:
    """Wait until the run has reached a step."""
    at = lambda: (heartbeat.read(run / f"beat-{rank}.json") or heartbeat.Heartbeat()).step  # noqa: E731
    until(lambda: at() >= step, f"step {step} was not reached")


def ended(run: Path) -> tuple[str, str, int, int]:
    record: dict[str, Any] = json.loads((run / "run.json").read_text())
    return record["state"], record["reason"], record["exit_code"], record["step"]


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["0", pytest.param("2", marks=pytest.mark.nightly)])
def test_a_stop_request_has_a_run_save_and_leave_with_0(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, restarts: str
) -> None:
    launched, run = {"DTRAIN_LAUNCH": "a1"}, tmp_path / "runs" / "small"
    one = started(tmp_path, *LONG, "--restarts", restarts, **launched)
    trains(run)
    (run / "stop").touch()
    output, _ = one.communicate(timeout=200)
    assert one.returncode == 0, output
    state, reason, code, step = ended(run)
    assert (state, reason, code) == ("stopped", f"stopped on request at step {step}, saved", 0)
    assert (run / "checkpoints" / str(step) / "MANIFEST.json").exists()
    again = dtrain("run", recipe, *LONG, "--restarts", restarts, **launched)
    assert "stopped: stopped on request before the first step of this start" in again.stderr
    assert ended(run)[3] == step
    typed = dtrain("run", recipe, f"steps={step + 1}")
    assert "the stop request of an earlier start" in typed.stderr
    assert f"resumed from step {step}" in typed.stderr


@pytest.mark.nightly
def test_a_run_may_take_so_many_hours_in_all_of_its_starts(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    run, hours = tmp_path / "runs" / "small", ["--hours", "0.004"]
    done = dtrain("run", recipe, *LONG, *hours)
    assert "stopped: the time limit of 0.004 hours is reached; saved at step" in done.stderr
    state, reason, code, step = ended(run)
    assert (state, reason, code) == ("stopped", f"the time limit of 0.004 hours is reached; saved at step {step}", 0)
    again = dtrain("run", recipe, *LONG, *hours)
    assert "stopped: the time limit of 0.004 hours is reached\n" in again.stderr
    assert ended(run)[3] == step
    dtrain("run", recipe, f"steps={step + 1}", "evaluate.every=0", "--hours", "1")
    assert ended(run)[0] == "finished"
    refused = dtrain("run", recipe, "--hours", "0", code=2)
    assert "--hours 0 is not above 0" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["0", pytest.param("2", marks=pytest.mark.nightly)])
def test_a_second_sigterm_soon_after_the_first_is_the_same_request(recipe: Path, tmp_path: Path, restarts: str) -> None:
    """As SLURM sends it: twice within 0.2 s, while the run is delayed and cannot save yet."""
    one = started(tmp_path, *LONG, "--restarts", restarts, DTRAIN_FAULT="sleep@step:5")
    run = tmp_path / "runs" / "small"
    trains(run, 4)
    for _ in range(2):
        one.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    output, _ = one.communicate(timeout=200)
    assert one.returncode == 75, output
    assert ended(run)[:3] == ("stopped", f"saved at step {ended(run)[3]} of 1000000", 75)


@pytest.mark.slow
def test_a_preemption_notice_acts_as_sigterm(recipe: Path, tmp_path: Path) -> None:
    taken = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            waits, spot = "wait_for_change" in self.path, "preempted" in self.path
            if waits:
                taken.wait(120)
            self.send_response(200)
            self.send_header("ETag", "2" if waits else "1")
            self.end_headers()
            self.wfile.write(b"TRUE" if waits and spot else b"FALSE" if spot else b"NONE")

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{http.server_address[1]}"
        one = started(tmp_path, *LONG, DTRAIN_METADATA="google", GCE_METADATA_HOST=host)
        trains(tmp_path / "runs" / "small")
        taken.set()
        output, _ = one.communicate(timeout=200)
        http.shutdown()
    assert one.returncode == 75, output
    assert "Google Cloud preempts this machine" in output
    assert ended(tmp_path / "runs" / "small")[3] > 0


class Hosts:
    """Two hosts with a shared folder, each with its own supervisor."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "runs" / "small"
        self.hosts: dict[int, subprocess.Popen[str]] = {}
        with socket.socket() as probe:
            probe.bind(("", 0))
            self.address = f"localhost:{probe.getsockname()[1]}"

    def start(self, *options: str, ranks: Sequence[int] = (0, 1), environment: Mapping[str, str] | None = None) -> None:
        for rank in ranks:
            place = {"DTRAIN_RANK": str(rank), "DTRAIN_WORLD_SIZE": "2", "DTRAIN_COORDINATOR": self.address}
            given = {"DTRAIN_LAUNCH": "a1"} | dict(environment or {}) | place
            self.hosts[rank] = started(self.folder, "--devices", "2", "mesh.fsdp=2", *options, **given)

    def codes(self) -> tuple[list[int], str]:
        """Their exit codes, and all of their output."""
        output = [self.hosts[rank].communicate(timeout=200)[0] for rank in sorted(self.hosts)]
        return [self.hosts[rank].returncode for rank in sorted(self.hosts)], "\n".join(output)

    def child(self, rank: int) -> int | None:
        shown = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.hosts[rank].pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        return int(shown[0]) if shown else None


@pytest.fixture
def hosts(recipe: Path, tmp_path: Path) -> Any:
    found = Hosts(tmp_path)
    yield found
    for host in found.hosts.values():
        if host.poll() is None:
            host.kill()
            host.communicate()


@pytest.mark.slow
def test_a_stop_request_ends_all_hosts_with_0(hosts: Hosts) -> None:
    hosts.start(*LONG, "--restarts", "2")
    trains(hosts.run)
    (hosts.run / "stop").touch()
    codes, output = hosts.codes()
    assert codes == [0, 0], output
    state, reason, code, step = ended(hosts.run)
    assert (state, reason, code) == ("stopped", f"stopped on request at step {step}, saved", 0)
    hosts.start(*LONG, "--restarts", "2")
    codes, output = hosts.codes()
    assert codes == [0, 0], output
    assert output.count("stopped on request before the first step of this start") == 2


@pytest.mark.nightly
def test_at_the_end_of_the_hours_all_hosts_exit_with_0(hosts: Hosts) -> None:
    for _ in range(2):
        hosts.start(*LONG, "--restarts", "2", "--hours", "0.004")
        codes, output = hosts.codes()
        assert codes == [0, 0], output
        assert output.count("the time limit of 0.004 hours is reached") >= 2
    assert ended(hosts.run)[2] == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_sigterm_to_one_host_ends_both_with_75(hosts: Hosts, rank: int) -> None:
    hosts.start(*LONG, "--restarts", "2")
    trains(hosts.run)
    hosts.hosts[rank].terminate()
    codes, output = hosts.codes()
    assert codes == [75, 75], output
    assert ended(hosts.run)[:3] == ("stopped", f"saved at step {ended(hosts.run)[3]} of 1000000", 75)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_host_before_the_rendezvous_ends_both_with_75(hosts: Hosts, rank: int) -> None:
    hosts.start(*LONG, "--restarts", "2", ranks=(1 - rank,))
    until(lambda: hosts.child(1 - rank) is not None, "the first did not begin")
    hosts.start(*LONG, "--restarts", "2", ranks=(rank,), environment={"DTRAIN_FAULT": "sleep@join"})
    until(lambda: hosts.child(rank) is not None, "the second did not begin")
    hosts.hosts[rank].terminate()
    codes, output = hosts.codes()
    assert codes == [75, 75], output


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_process_that_is_killed_once_is_started_again_on_both(hosts: Hosts, tmp_path: Path, rank: int) -> None:
    (tmp_path / "notes").mkdir()
    fault = {"DTRAIN_FAULT": f"kill@step:9/{rank}", "DTRAIN_FAULT_NOTES": str(tmp_path / "notes")}
    hosts.start("--restarts", "2", "checkpoint.every=4", environment=fault)
    codes, output = hosts.codes()
    assert codes == [0, 0], output
    assert ended(hosts.run)[0] == "finished"


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_repeatedly_ends_both_with_8(hosts: Hosts, rank: int) -> None:
    hosts.start("--restarts", "1", environment={"DTRAIN_FAULT": f"kill@step:3/{rank}"})
    codes, output = hosts.codes()
    assert codes == [8, 8], output
    assert ended(hosts.run)[:3] == ("failed", "2 starts in a row saved no new checkpoint (--restarts 1)", 8)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_both_with_7(hosts: Hosts) -> None:
    hosts.start("--restarts", "2", "optimizer={kind: adamw, lr: 1e4, decay: 0.9}")
    codes, output = hosts.codes()
    assert codes == [7, 7], output


REPLACED = {"DTRAIN_REPLACES_HOSTS": "1", "DTRAIN_RENDEZVOUS_S": "10"}


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["0", pytest.param("2", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_where_hosts_are_replaced_the_other_exits_with_75(hosts: Hosts, rank: int, restarts: str) -> None:
    hosts.start(*LONG, "checkpoint.every=20", "--restarts", restarts, environment=REPLACED)
    until(lambda: saved_steps(hosts.run / "checkpoints") != [], "no step was saved")
    hosts.hosts[rank].kill()
    codes, output = hosts.codes()
    assert codes[1 - rank] == 75, output
    state, reason, code, _ = ended(hosts.run)
    assert (state, code) == ("stopped", 75)
    assert f"host {rank} of 2 lost" in reason if restarts == "2" else "another host is lost" in reason


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_where_hosts_are_replaced_a_missing_one_is_named(hosts: Hosts, rank: int) -> None:
    hosts.start(*LONG, "--restarts", "2", ranks=(rank,), environment=REPLACED | {"DTRAIN_RENDEZVOUS_S": "2"})
    codes, output = hosts.codes()
    assert codes == [75], output
    assert f"stopped: host {1 - rank} of 2 lost: process {1 - rank} of 2 did not arrive" in output


def test_half_of_the_variables_is_refused(dtrain: Dtrain, recipe: Path) -> None:
    refused = dtrain("run", recipe, code=3, DTRAIN_RANK="0")
    assert "DTRAIN_RANK is set, but DTRAIN_WORLD_SIZE and DTRAIN_COORDINATOR are not set" in refused.stderr
    assert "as DTRAIN_RANK=0 DTRAIN_WORLD_SIZE=2" in refused.stderr
