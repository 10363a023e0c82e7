"""What dtrain does on a host of a launched run: `python -m dtrain.launch.agent` answers requests, a line of JSON each,
from standard input on standard output, until standard input ends.

`start` leaves a runner behind, which runs `dtrain run`, again where the run was preempted (75), and writes down how it
ended. Secrets come on standard input and stay in the runner's environment: no file and no command line has them.
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
from dtrain.core.errors import DtrainError
from dtrain.launch.commands import followed
from dtrain.launch.registry import NAME as RECORD
from dtrain.launch.runner import RunnerDir, kill, start, supervise
from dtrain.launch.wire import RUNS_HERE, HostJob, Reply, Request, decode, encode

ADDRESSES = re.compile(r" +@ +0x|\*\*\* Check failure stack trace")
"""What C++ adds where JAX ends a process; it stays in the log."""
PACKAGES = ("jax", "jaxlib", "numpy", "orbax-checkpoint")
ROOM = 1e9
"""Bytes that must be free where checkpoints go."""
POLL = 0.2


def look(request: Request) -> Reply:
    """What this host is, before anything is started: versions, clock, disk, its own name, what it can write."""
    import importlib.metadata

    if request.ready and not Path(request.ready).expanduser().exists():
        return Reply()
    job, own = request.job, RunnerDir(request.job)
    runs, port, host, problems = own.run.path.parent, job.coordinator.rpartition(":")[2], socket.gethostname(), []
    try:
        runs.mkdir(parents=True, exist_ok=True)
        if request.token:
            (runs / f".look-{request.token}-{job.rank}").touch()
        free = shutil.disk_usage(runs).free
        problems += [f"{free / 1e9:.1f} GB free in {runs}"] if free < ROOM else []
    except OSError as error:
        problems.append(f"cannot write to {runs}: {error.strerror}")
    if port and job.rank == 0 and not _works(lambda: socket.create_server(("", int(port))).close()):
        problems.append(f"port {port} is taken")
    problems += [f"{job.name} {RUNS_HERE}, as process {pid}" for pid in own.living()[:1]]
    if job.world_size > 1 and not _works(lambda: socket.getaddrinfo(host, None)):
        problems.append(f"it does not resolve its own name, {host}: add it to /etc/hosts")
    versions = {name: importlib.metadata.version(name) for name in PACKAGES} | {"dtrain": __version__}
    return Reply(ready=True, time=time.time(), versions=versions, problems=tuple(problems))


def marks(request: Request) -> Reply:
    """The ranks whose marks of `look` are seen here."""
    paths = list(RunnerDir(request.job).run.path.parent.glob(f".look-{request.token}-*"))
    for path in paths:
        path.unlink(missing_ok=True)
    return Reply(items=tuple(sorted(int(path.name.rpartition("-")[2]) for path in paths)))


def status(request: Request) -> Reply:
    """Whether the runner is alive, how it ended, and what the run folder has."""
    own, values = RunnerDir(request.job), {}
    with suppress(DtrainError):  # a damaged one
        values = own.run.read_record()
    alive = own.process("runner") is not None
    text = f"step {values['step']}/{values['steps']} saved" if values.get("steps") else ""
    if alive:
        text = f"{_where(heartbeat.read(own.run.heartbeat(request.job.rank)))}; {text}".rstrip("; ")
    recorded = (own.run.path / RECORD).exists()
    return Reply(alive=alive, code=own.end(), state=values.get("state", ""), recorded=recorded, text=text)


def _where(heartbeat: heartbeat.Heartbeat | None) -> str:
    if heartbeat is None:
        return "starting"
    silent = time.time() - heartbeat.at
    late = f", silent for {silent:.0f} s" if silent > heartbeat.patience / 10 else ""
    return f"in {heartbeat.section} after step {heartbeat.step}{late}"


def stop(request: Request) -> Reply:
    """Ask the run to save and leave, and the runner not to start it again."""
    own = RunnerDir(request.job)
    with suppress(OSError):  # for hosts that cannot be asked; the signal is quicker, and needs no clock in common
        own.run.stop_request.touch()
    runner = own.process("runner")
    if runner and not own.stopping.exists():  # a second signal would end it unsaved
        own.stopping.touch()
        os.kill(runner.pid, signal.SIGTERM)
    return Reply(items=(runner.pid,) if runner else ())


def logs(request: Request) -> Iterator[Reply]:
    """What the run printed on this host since its last start; to be followed, until it ends or standard input does."""
    own = RunnerDir(request.job)
    runner = own.read("runner")
    begin = runner.log_offset if runner and request.offset is None else request.offset or 0
    over, left = (
        lambda: not request.follow or own.process("runner") is None,
        lambda: select.select([sys.stdin], [], [], POLL)[0],
    )
    for offset, text in followed(own.log, begin, over, left):
        if not ADDRESSES.match(text):
            yield Reply(offset=offset, text=text)
    yield Reply(code=own.end())


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


VERBS: dict[str, Callable[[Request], Reply]] = {
    verb.__name__: verb for verb in (look, marks, start, status, stop, kill)
}


def main() -> int:
    """Answer requests, or be the runner."""
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
        os._exit(0)  # nobody listens any more
    return 0


if __name__ == "__main__":
    sys.exit(main())
