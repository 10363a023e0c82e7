"""A launched run on its host: the process that supervises it, its small files, and how it is started and ended."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dtrain.core.errors import EnvironmentFault, Locked, Stopped
from dtrain.core.lease import start_time
from dtrain.core.run_dir import Folder, overwrite
from dtrain.launch.registry import NAME as RECORD
from dtrain.launch.wire import RUNS_HERE, HostJob, ProcessFile, Reply, Request, decode, encode

PAUSE = 10.0
"""Seconds between a preemption and the next start."""


class RunnerDir:
    """The folder of one launched run on this host; `run` is where the run itself is kept, perhaps on a shared disk."""

    def __init__(self, job: HostJob) -> None:
        self.run = Folder(Path(job.runs).expanduser().absolute() / job.name)
        self.path = Path(job.folder).expanduser() / job.name / socket.gethostname()  # of a home that all share
        self.log, self.recipe, self.stopping = self.path / "log.txt", self.path / "recipe.yaml", self.path / "stop"

    def living(self) -> list[int]:
        """The runner and the run that it started, those of them that live."""
        return [process.pid for process in map(self.process, ("runner", "run")) if process]

    def process(self, name: str) -> ProcessFile | None:
        """The process of such a file, where it lives."""
        process = self.read(name)
        return process if process and process.start_time and start_time(process.pid) == process.start_time else None

    def end(self) -> int | None:
        """The exit code of the run on this host; None while it has not ended."""
        process = self.read("run")
        return process.code if process else None

    def read(self, name: str) -> ProcessFile | None:
        """One of its small files; None where there is none. EnvironmentFault where another version wrote it."""
        try:
            return decode((self.path / f"{name}.json").read_text(), ProcessFile)
        except (OSError, ValueError):
            return None

    def write(self, name: str, process: ProcessFile) -> None:
        """Write one of its small files."""
        overwrite(self.path / f"{name}.json", encode(process))


def start(request: Request) -> Reply:
    """Leave a runner behind. Locked where one is alive."""
    own = RunnerDir(request.job)
    if alive := own.living():
        raise Locked(f"{request.job.name} {RUNS_HERE}, as process {alive[0]}")
    own.path.mkdir(parents=True, exist_ok=True)
    own.path.chmod(0o700)
    stale = [own.run.stop_request] if request.job.rank == 0 else []
    for path in (own.path / "run.json", own.stopping, *stale):
        path.unlink(missing_ok=True)
    overwrite(own.recipe, request.recipe)
    if request.record:
        own.run.path.mkdir(parents=True, exist_ok=True)
        overwrite(own.run.path / RECORD, request.record)
    job = replace(request.job, runs=str(own.run.path.parent))
    with os.fdopen(os.open(own.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
        offset = os.fstat(log.fileno()).st_size
        runner = subprocess.Popen(
            [sys.executable, "-m", "dtrain.launch.agent", "runner", encode(job)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | dict(request.environment),
            start_new_session=True,
        )  # fmt: skip
    own.write("runner", ProcessFile(runner.pid, start_time(runner.pid), offset))
    return Reply(items=(runner.pid,))


def supervise(job: HostJob) -> int:
    """Run `dtrain run` until it is done, fails, or was asked to stop.

    There is no limit to how often it is started again: `dtrain run` itself counts in the run folder the starts of a
    launch that save nothing new, and the hours of all, and leaves with a code other than 75 at its limits."""
    own, asked = RunnerDir(job), False
    command = [sys.executable, "-m", "dtrain", "run", str(own.recipe), "--runs-dir", job.runs, *job.arguments]
    child: subprocess.Popen[bytes] | None = None

    def stop(_number: int, _frame: object) -> None:
        nonlocal asked
        if child and not asked:  # a second one would end it unsaved
            child.terminate()
        asked = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while True:
        child = subprocess.Popen(command, env=os.environ | job.environment(), start_new_session=True)
        process = ProcessFile(child.pid, start_time(child.pid))
        own.write("run", process)
        if asked:  # while it was started
            child.terminate()
        code = child.wait()
        if asked and code == -signal.SIGTERM:  # it came before the run handled signals, or after it had saved and left
            code = Stopped.exit_code
        if code != Stopped.exit_code or asked or own.stopping.exists() or own.run.stop_request.exists():
            break
        print(f"preempted; starting again in {PAUSE:.0f} s", flush=True)
        time.sleep(PAUSE)
        if asked:
            break
    own.write("run", replace(process, code=code if code >= 0 else 128 - code))
    return 0


def kill(request: Request) -> Reply:
    """Leave no process of the run on this host, nor its log, small files and launch record; what it saved stays."""
    own = RunnerDir(request.job)
    family = _family(own.living())
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while any(start_time(pid) for pid in family) and time.monotonic() < end:
        time.sleep(0.05)
    if left := [pid for pid in family if start_time(pid)]:
        raise EnvironmentFault(f"processes {left} do not end")
    shutil.rmtree(own.path, ignore_errors=True)
    with suppress(OSError):
        own.path.parent.rmdir()
    if request.job.rank == 0:
        (own.run.path / RECORD).unlink(missing_ok=True)
    return Reply(items=tuple(family))


def _family(first: list[int]) -> list[int]:
    """Processes and all that they started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = list(first)
    for one in family:
        family += [child for child, parent in parents.items() if parent == one and child not in family]
    return family
