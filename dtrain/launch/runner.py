"""The runner, which supervises a launched run on its host: its files, and how it is started and killed."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dtrain.core.errors import EnvironmentFault, Locked, Stopped
from dtrain.core.files import overwrite
from dtrain.core.lease import start_time
from dtrain.core.run_dir import Folder
from dtrain.launch.registry import NAME as RECORD
from dtrain.launch.wire import RUNS_HERE, HostJob, ProcessFile, Reply, Request, decode, encode

PAUSE = 10.0
"""Seconds between a preemption and the restart."""


class RunnerDir:
    """Folder of the runner's files on this host; `run` is the folder of the run, which may be on a shared disk."""

    def __init__(self, job: HostJob) -> None:
        self.run = Folder(Path(job.runs).expanduser().absolute() / job.name)
        self.path = (
            Path(job.folder).expanduser() / job.name / socket.gethostname()
        )  # one per host, as hosts may share a home
        self.log, self.recipe, self.stopping = self.path / "log.txt", self.path / "recipe.yaml", self.path / "stop"

    def living(self) -> list[int]:
        """PIDs of the runner and of the run that it started, if they are alive."""
        return [process.pid for process in map(self.process, ("runner", "run")) if process]

    def process(self, name: str) -> ProcessFile | None:
        """The process recorded in NAME.json, if it is alive."""
        process = self.read(name)
        return process if process and process.start_time and start_time(process.pid) == process.start_time else None

    def end(self) -> int | None:
        """Exit code of the run on this host; None while it has not ended."""
        process = self.read("run")
        return process.code if process else None

    def running_recipe(self) -> str:
        """The recipe of the run that is alive."""
        with suppress(OSError):
            return self.recipe.read_text()
        return ""

    def read(self, name: str) -> ProcessFile | None:
        """Content of NAME.json; None if it is missing or invalid. EnvironmentFault if another version wrote it."""
        try:
            return decode((self.path / f"{name}.json").read_text(), ProcessFile)
        except (OSError, ValueError):
            return None

    def write(self, name: str, process: ProcessFile) -> None:
        """Write NAME.json."""
        overwrite(self.path / f"{name}.json", encode(process))


def start(request: Request) -> Reply:
    """Start a runner in the background. Locked if one is alive already."""
    files = RunnerDir(request.job)
    if alive := files.living():
        raise Locked(f"{request.job.name} {RUNS_HERE}, as process {alive[0]}")
    files.path.mkdir(parents=True, exist_ok=True)
    files.path.chmod(0o700)
    stale = [files.run.stop_request] if request.job.rank == 0 else []
    for path in (files.path / "run.json", files.stopping, *stale):
        path.unlink(missing_ok=True)
    overwrite(files.recipe, request.recipe)
    if request.record:
        files.run.path.mkdir(parents=True, exist_ok=True)
        overwrite(files.run.path / RECORD, request.record)
    job = replace(request.job, runs=str(files.run.path.parent))
    with os.fdopen(os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
        offset = os.fstat(log.fileno()).st_size
        runner = subprocess.Popen(
            [sys.executable, "-P", "-m", "dtrain.launch.agent", "runner", encode(job)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | dict(request.environment),
            start_new_session=True,
        )  # fmt: skip
    files.write("runner", ProcessFile(runner.pid, start_time(runner.pid), offset))
    return Reply(items=(runner.pid,))


def supervise(job: HostJob) -> int:
    """Run `dtrain run` until it finishes, fails, or is stop_requested to stop; restart it after a preemption.

    Restarts are not limited here: `dtrain run` counts, in the run folder, the starts of a launch that save nothing new
    and the hours of all starts, and exits with a code other than 75 at its limits."""
    files, stop_requested = RunnerDir(job), False
    command = [sys.executable, "-m", "dtrain", "run", str(files.recipe), "--runs-dir", job.runs, *job.arguments]
    child: subprocess.Popen[bytes] | None = None

    def stop(_number: int, _frame: object) -> None:
        nonlocal stop_requested
        if child and not stop_requested:  # a second signal would end it without saving
            child.terminate()
        stop_requested = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while True:
        child = subprocess.Popen(command, env=os.environ | job.environment(), start_new_session=True)
        process = ProcessFile(child.pid, start_time(child.pid))
        files.write("run", process)
        if stop_requested:  # the signal arrived during the start
            child.terminate()
        code = child.wait()
        if stop_requested and code == -signal.SIGTERM:  # before the run handled signals, or after its save
            code = Stopped.exit_code
        if code != Stopped.exit_code or stop_requested or files.stopping.exists() or files.run.stop_request.exists():
            break
        print(f"preempted; restarting in {PAUSE:.0f} s", flush=True)
        time.sleep(PAUSE)
        if stop_requested:
            break
    files.write("run", replace(process, code=code if code >= 0 else 128 - code))
    return 0


def fail(request: Request) -> Reply:
    """Kill a process that trains, or with `whole` all processes of the run on this host, as if it lost power: its files
    stay, and no exit code is recorded. EnvironmentFault if the run is not alive here."""
    files = RunnerDir(request.job)
    run = files.process("run")
    if run is None:
        raise EnvironmentFault(f"{request.job.name} does not run here")
    below = _family([run.pid])[1:2]  # the first of those that it supervises
    chosen = _family(files.living()) if request.whole else below or [run.pid]
    _kill(chosen)
    return Reply(items=tuple(chosen))


def kill(request: Request) -> Reply:
    """Kill all processes of the run on this host; remove its log, runner files and launch record. Checkpoints stay."""
    files = RunnerDir(request.job)
    family = _family(files.living())
    _kill(family)
    shutil.rmtree(files.path, ignore_errors=True)
    with suppress(OSError):
        files.path.parent.rmdir()
    if request.job.rank == 0:
        (files.run.path / RECORD).unlink(missing_ok=True)
    return Reply(items=tuple(family))


def _kill(pids: Sequence[int]) -> None:
    """Kill these processes and wait until they are gone. EnvironmentFault if some stay."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while any(start_time(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    if left := [pid for pid in pids if start_time(pid)]:
        raise EnvironmentFault(f"processes {left} are still alive after SIGKILL")


def _family(first: list[int]) -> list[int]:
    """These processes and all their descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = list(first)
    for pid in family:  # grows while it is read
        family += [child for child, parent in parents.items() if parent == pid and child not in family]
    return family
