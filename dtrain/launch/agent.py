"""What dtrain does on a host of a launched run. It is asked in JSON on standard input, and answers in JSON.

    python -m dtrain.launch.agent look | start | status | stop | kill | logs

`start` leaves a keeper behind, which runs `dtrain run`, again where the run was preempted (75), and notes how it
ended. Secrets come on standard input and stay in the keeper's environment: no file and no command line has them.
"""

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from dtrain import __version__, beat
from dtrain.errors import DtrainError
from dtrain.folder import Folder
from dtrain.launch.keeper import Post, Told, keep, kill, read, start

ADDRESSES = re.compile(r" +@ +0x|\*\*\* Check failure stack trace")
"""What C++ adds where JAX ends a process; it stays in the log."""
PACKAGES = ("jax", "jaxlib", "numpy", "orbax-checkpoint")


def look(told: Told) -> Told:
    """What this host is, before anything is started: versions, clock, disk, its own name, what it can write."""
    import importlib.metadata

    runs = Path(told["runs"]).expanduser()
    found: Told = {"host": socket.gethostname(), "time": time.time(), "python": sys.version.split()[0]}
    found["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES} | {"dtrain": __version__}
    found["resolves"] = _resolves(socket.gethostname())
    found["problems"] = []
    try:
        runs.mkdir(parents=True, exist_ok=True)
        (runs / f".look-{told['token']}-{told['rank']}").touch()
        found["free"] = shutil.disk_usage(runs).free
    except OSError as error:
        found["problems"].append(f"cannot write to {runs}: {error.strerror}")
    if told["seat"].startswith("0/") and not _free(told["port"]):
        found["problems"].append(f"port {told['port']} is taken")
    alive = Post(told).living()
    if alive:
        found["problems"].append(f"{told['name']} runs here already, as process {alive[0]}")
    return found


def met(told: Told) -> Told:
    """Which ranks' marks of `look` are seen in the run's folder here; they are removed by the first."""
    marks = list(Path(told["runs"]).expanduser().glob(f".look-{told['token']}-*"))
    seen = sorted(int(mark.name.rpartition("-")[2]) for mark in marks)
    if told.get("clear"):
        for mark in marks:
            mark.unlink(missing_ok=True)
    return {"seen": seen}


def status(told: Told) -> Told:
    """Whether the keeper is alive, how it ended, and what the run's folder tells."""
    post, run = Post(told), Folder(Path(told["runs"]).expanduser() / told["name"])
    sign = beat.read(run.beat(told["rank"]))
    record = read(run.record) or {}
    return {
        "alive": post.keeper() is not None,
        "end": post.end(),
        "sign": asdict(sign) if sign else None,
        "now": time.time(),
        "run": {key: record.get(key) for key in ("state", "step", "steps", "reason", "exit_code", "starts")},
    }


def stop(told: Told) -> Told:
    """Ask the run to save and leave, and the keeper not to start it again."""
    post = Post(told)
    keeper = post.keeper()
    if keeper and not post.stopping.exists():  # a second signal would end it unsaved
        post.stopping.touch()
        os.kill(keeper["pid"], signal.SIGTERM)
    return {"asked": keeper is not None}


def logs(told: Told) -> Iterator[Told]:
    """What the run said on this host since its last start, line by line, and where wished until it ends."""
    post, offset = Post(told), told.get("offset")
    started = read(post.path / "keeper.json") or {}
    offset = started.get("from", 0) if offset is None else offset
    while True:
        over = not told.get("follow") or post.keeper() is None
        with suppress(FileNotFoundError), post.log.open("rb") as log:
            log.seek(offset)
            for line in log:
                if not line.endswith(b"\n") and not over:
                    break
                offset += len(line)
                text = line.decode(errors="replace").rstrip("\n")
                if not ADDRESSES.match(text):
                    yield {"offset": offset, "text": text}
        if over:
            yield {"ended": post.end() or {}}
            return
        time.sleep(0.2)


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


VERBS: dict[str, Callable[[Told], Told]] = {verb.__name__: verb for verb in (look, met, start, status, stop, kill)}


def main() -> int:
    """One verb; the answer is the last line of standard output."""
    verb = sys.argv[1]
    if verb == "keep":
        return keep(json.loads(sys.argv[2]))
    told = json.load(sys.stdin)
    try:
        if verb == "logs":
            for line in logs(told):
                print(json.dumps(line), flush=True)
        else:
            print(json.dumps({"answer": VERBS[verb](told)}))
    except DtrainError as error:
        print(json.dumps({"error": error.message}))
    except BrokenPipeError:
        os._exit(0)  # nobody listens any more
    return 0


if __name__ == "__main__":
    sys.exit(main())
