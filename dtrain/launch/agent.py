"""The agent on each host of a launched run. `python -m dtrain.launch.agent` reads requests from standard input, one
line of JSON each, and writes the replies to standard output, until standard input ends.

The verb `start` starts a runner in the background. The runner runs `dtrain run`, restarts it after a preemption (exit
code 75), and records its exit code. Secrets arrive on standard input and exist only in the runner's environment: no
file and no command line contains them.
"""

import os
import re
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from dtrain import __version__
from dtrain.core import heartbeat
from dtrain.core.errors import DtrainError, EnvironmentFault
from dtrain.core.files import code_digest
from dtrain.core.run_dir import newest_step
from dtrain.launch.commands import follow_log, text_of
from dtrain.launch.registry import NAME as RECORD
from dtrain.launch.runner import RunnerDir, fail, kill, start, supervise
from dtrain.launch.wire import CODE, RUNS_HERE, HostJob, Reply, Request, decode, encode

ADDRESSES = re.compile(r" +@ +0x|\*\*\* Check failure stack trace")
"""Lines of a C++ stack trace, printed when JAX aborts a process: `logs` omits them; the log file keeps them."""
PACKAGES = ("jax", "jaxlib", "numpy", "orbax-checkpoint")
ROOM = 1e9
"""Bytes that must be free on the disk for checkpoints."""
POLL = 0.2
"""Seconds between two reads of a log that is followed."""


def preflight(request: Request) -> Reply:
    """Check this host before a start: versions, clock, free disk space, port, host name, write access."""
    import importlib.metadata

    setup = ""
    if request.ready:
        try:
            setup = Path(request.ready).expanduser().read_text().strip()
        except OSError:
            return Reply()
    job, files = request.job, RunnerDir(request.job)
    runs, port, host, problems = files.run.path.parent, job.coordinator.rpartition(":")[2], socket.gethostname(), []
    try:
        runs.mkdir(parents=True, exist_ok=True)
        if request.token:
            (runs / f".look-{request.token}-{job.rank}").touch()
        free = shutil.disk_usage(runs).free
        problems += [f"only {free / 1e9:.1f} GB free in {runs}, {ROOM / 1e9:.0f} GB needed"] if free < ROOM else []
    except OSError as error:
        problems.append(f"cannot write to {runs}: {error.strerror}")
    living = files.living()[:1]
    if port and job.rank == 0 and not living and not _works(lambda: socket.create_server(("", int(port))).close()):
        problems.append(f"port {port} is in use")
    problems += [f"{job.name} {RUNS_HERE}, as process {pid}" for pid in living]
    if job.world_size > 1 and not _works(lambda: socket.getaddrinfo(host, None)):
        problems.append(f"it cannot resolve its own host name {host}: add the name to /etc/hosts")
    versions = {name: importlib.metadata.version(name) for name in PACKAGES} | {
        "dtrain": __version__,
        CODE: code_digest(),
    }
    return Reply(
        ready=True,
        setup=setup,
        time=time.time(),
        versions=versions,
        problems=tuple(problems),
        alive=bool(living),
        recipe=files.running_recipe() if living else "",
        code=files.end(),
    )


def folder_markers(request: Request) -> Reply:
    """The ranks whose `preflight` wrote a marker file that is visible on this host; the files are removed."""
    paths = list(RunnerDir(request.job).run.path.parent.glob(f".look-{request.token}-*"))
    for path in paths:
        path.unlink(missing_ok=True)
    return Reply(items=tuple(sorted(int(path.name.rpartition("-")[2]) for path in paths)))


def status(request: Request) -> Reply:
    """Whether the runner or the run is alive, the exit code, and the progress recorded in the run folder."""
    files, values = RunnerDir(request.job), {}
    with suppress(DtrainError):  # run.json is damaged
        values = files.run.read_record()
    runner, code = files.process("runner"), files.end()
    alive = runner is not None or files.process("run") is not None
    if code is None and not alive and values.get("state") in ("finished", "stopped"):
        code = values.get("exit_code")  # the runner died before the run ended
    text = f"step {newest_step(files.run, values)}/{values['steps']} saved" if values.get("steps") else ""
    latest = heartbeat.read(files.run.heartbeat(request.job.rank))
    if alive:
        text = f"{_where(latest)}; {text}".rstrip("; ")
        text += "" if runner else "; its runner died: it is not restarted"
    recorded = (files.run.path / RECORD).exists()
    return Reply(alive=alive, code=code, state=values.get("state", ""), recorded=recorded, text=text, heartbeat=latest)


def read(request: Request) -> Reply:
    """The text of a file of the run folder. EnvironmentFault if it cannot be read."""
    folder = RunnerDir(request.job).run.path.resolve()
    path = (folder / request.path).resolve()
    if not path.is_relative_to(folder):
        raise EnvironmentFault(f"{request.path} is not in {folder}")
    return Reply(text=text_of(path))


def _where(heartbeat: heartbeat.Heartbeat | None) -> str:
    if heartbeat is None:
        return "starting"
    silent = time.time() - heartbeat.at
    late = f", no heartbeat for {silent:.0f} s" if silent > heartbeat.patience / 10 else ""
    return f"in {heartbeat.section} after step {heartbeat.step}{late}"


def stop(request: Request) -> Reply:
    """Ask the run to save and exit, and the runner not to restart it."""
    files = RunnerDir(request.job)
    with suppress(OSError):  # also stops unreachable hosts; the signal is faster and needs no synchronised clocks
        files.run.stop_request.touch()
    alive = files.process("runner") or files.process("run")  # of a runner that died the run may be alive
    if alive and not files.stopping.exists():  # a second signal would end it without saving
        files.stopping.touch()
        os.kill(alive.pid, signal.SIGTERM)
    return Reply(items=(alive.pid,) if alive else ())


def logs(request: Request) -> Iterator[Reply]:
    """The run's output on this host since its last start; with `follow`, until the run or standard input ends."""
    files = RunnerDir(request.job)
    runner = files.read("runner")
    begin = runner.log_offset if runner and request.offset is None else request.offset or 0
    finished, input_closed = (
        lambda: not request.follow or files.process("runner") is None,
        lambda: select.select([sys.stdin], [], [], POLL)[0],
    )
    for offset, text in follow_log(files.log, begin, finished, input_closed):
        if not ADDRESSES.match(text):
            yield Reply(offset=offset, text=text)
    yield Reply(code=files.end())


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


VERBS: dict[str, Callable[[Request], Reply]] = {
    verb.__name__: verb for verb in (preflight, folder_markers, start, status, read, stop, fail, kill)
}


def main() -> int:
    """Answer requests; with the argument `runner`, supervise a run."""
    if sys.argv[1:2] == ["runner"]:
        return supervise(decode(sys.argv[2], HostJob))
    try:
        for line in sys.stdin:
            try:
                request = decode(line, Request)
                for answer in logs(request) if request.verb == "logs" else [VERBS[request.verb](request)]:
                    print(encode(answer), flush=True)
            except DtrainError as error:
                print(encode(Reply(problem=error.message)), flush=True)
    except BrokenPipeError:
        os._exit(0)  # the caller closed the connection
    return 0


if __name__ == "__main__":
    sys.exit(main())
