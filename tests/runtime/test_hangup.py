"""A closed terminal, a full disk under the output, a sweep that dies: a run saves and stops, or trains on."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtrain.core.errors import EnvironmentFault, user_error
from dtrain.core.run_dir import Folder
from tests.conftest import PACED, bare_environment
from tests.waiting import until

pytestmark = pytest.mark.slow
LAUNCHER = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.{hangup})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
LONG = ["mlp-digits", "epochs=null", "steps=100000", "evaluate.every=0", "name=long"]


def started(folder: Path, *words: str, ignoring: bool = False) -> "subprocess.Popen[bytes]":
    """Start it as a terminal does, or nohup. This process may ignore SIGHUP, as libtpu does that other tests load."""
    hangup = "SIG_IGN" if ignoring else "SIG_DFL"
    command = [sys.executable, "-c", LAUNCHER.format(hangup=hangup), "-m", "dtrain", *words]
    where = {"cwd": folder, "env": bare_environment() | PACED, "start_new_session": True}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **where)  # type: ignore[call-overload]


def training(place: Folder) -> bool:
    return place.metrics.is_file() and '"train/loss"' in place.metrics.read_text()


def test_a_hang_up_saves_and_stops_unless_it_is_ignored(tmp_path: Path) -> None:
    place = Folder(tmp_path / "runs" / "long")
    run = started(tmp_path, "run", *LONG, "track.every=1")
    until(lambda: training(place))
    run.send_signal(signal.SIGHUP)
    assert run.wait(60) == 75
    record = place.read_record()
    assert (record["state"], record["stopped_by"]) == ("stopped", "SIGHUP")
    assert record["step"] > 0

    ignoring = started(tmp_path, "run", *LONG, "track.every=1", ignoring=True)
    rows = place.metrics.read_text().count("\n")
    until(lambda: place.metrics.read_text().count("\n") > rows + 2)
    ignoring.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert ignoring.poll() is None
    ignoring.send_signal(signal.SIGTERM)
    assert ignoring.wait(60) == 75
    assert place.read_record()["stopped_by"] == "SIGTERM"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_no_run_outlives_its_sweep(tmp_path: Path, number: int) -> None:
    words = ["sweep", "mlp-digits", "epochs=null", "steps=100000", "track.every=1", "evaluate.every=0"]
    sweep = started(tmp_path, *words, "optimizer.lr=0.001,0.002")
    until(lambda: any(training(Folder(path.parent)) for path in tmp_path.glob("runs/*/*/metrics.jsonl")))
    (metrics,) = tmp_path.glob("runs/*/*/metrics.jsonl")
    os.kill(sweep.pid, number)
    sweep.wait(60)
    until(lambda: Folder(metrics.parent).read_record().get("state") == "stopped", 60)
    assert Folder(metrics.parent).read_record()["stopped_by"] in ("SIGTERM", "SIGINT")


def test_a_full_disk_under_the_output_does_not_end_a_run(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    command = [sys.executable, "-m", "dtrain", "run", "mlp-digits", "epochs=1", "optimizer.schedule.warmup=5", "name=a"]
    with full.open("w") as out:
        done = subprocess.run(
            command, cwd=tmp_path, env=bare_environment(), stdout=subprocess.DEVNULL, stderr=out, check=False
        )
        listed = subprocess.run(
            [sys.executable, "-m", "dtrain", "ls"],
            cwd=tmp_path,
            env=bare_environment(),
            stdout=out,
            stderr=out,
            check=False,
        )
    record = json.loads((tmp_path / "runs" / "a" / "run.json").read_text())
    assert record["state"] == "finished"
    assert (done.returncode, listed.returncode) == (0, 3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        ImportError("libfoo.so: failed to map segment from shared object"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes"),
    ],
)
def test_errors_of_too_little_memory_are_known(error: Exception) -> None:
    known = user_error(error)
    assert isinstance(known, EnvironmentFault)
    assert known.message.startswith("out of memory")
    assert user_error(RuntimeError("something else")) is None


NO_MEMORY = """
import importlib.abc, sys
class Full(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "dtrain.cli.launch":
            raise ImportError("_random.so: failed to map segment from shared object")
sys.meta_path.insert(0, Full())
sys.argv = ["dtrain", "ls"]
from dtrain.__main__ import main
main()
"""


def test_too_little_memory_for_the_imports_ends_with_3() -> None:
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("error: out of memory: _random.so: failed to map segment")
    assert "Traceback" not in done.stderr


def test_an_error_of_the_interpreter_at_the_limit_of_memory_is_one_of_memory() -> None:
    errors = SystemError("error return without exception set"), ImportError("Encountered an error")
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert [user_error(error) for error in errors] == [None, None]
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**25, before[1]))
        known = [user_error(error) for error in errors]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert all(isinstance(one, EnvironmentFault) and one.message.startswith("out of memory") for one in known)
