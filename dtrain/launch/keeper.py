"""A launched run on its host: what keeps it, its small files, and how it is started and ended there."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtrain.errors import EnvironmentFault, Locked
from dtrain.folder import overwrite
from dtrain.lease import born

PREEMPTED = 75
PAUSE = 10.0
"""Seconds between a preemption and the next start."""

Told = dict[str, Any]
"""What a host is told, as JSON."""


class Post:
    """The folder of one launched run on this host."""

    def __init__(self, told: Told) -> None:
        self.path = Path(told["folder"]).expanduser() / told["name"] / socket.gethostname()  # of a home that all share
        self.log, self.recipe, self.stopping = self.path / "log.txt", self.path / "recipe.yaml", self.path / "stop"

    def keeper(self) -> Told | None:
        """The living keeper, if there is one."""
        return self._living("keeper")

    def living(self) -> list[int]:
        """The keeper and the run that it started, those of them that live."""
        return [found["pid"] for found in map(self._living, ("keeper", "run")) if found]

    def _living(self, name: str) -> Told | None:
        found = read(self.path / f"{name}.json")
        return found if found and found.get("born") and born(found.get("pid")) == found["born"] else None

    def end(self) -> Told | None:
        """How the run ended on this host; None while it has not."""
        return read(self.path / "end.json")

    def note(self, name: str, values: Told) -> None:
        """Write one of its small files."""
        overwrite(self.path / f"{name}.json", json.dumps(values))


def start(told: Told) -> Told:
    """Leave a keeper behind. Locked where one is alive."""
    post = Post(told)
    alive = post.living()
    if alive:
        raise Locked(f"{told['name']} runs here already, as process {alive[0]}")
    post.path.mkdir(parents=True, exist_ok=True)
    post.path.chmod(0o700)
    for path in (post.path / "end.json", post.stopping):
        path.unlink(missing_ok=True)
    overwrite(post.recipe, told["recipe"])
    job = {key: told[key] for key in ("folder", "name", "arguments", "seat", "hours")}
    job["runs"] = str(Path(told["runs"]).expanduser().absolute())
    log = os.open(post.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    command = [sys.executable, "-m", "dtrain.launch.agent", "keep", json.dumps(job)]
    keeper = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | told["environment"],
        start_new_session=True,
    )  # fmt: skip
    os.close(log)
    values = {"pid": keeper.pid, "born": born(keeper.pid), "since": time.time(), "from": post.log.stat().st_size}
    post.note("keeper", values)
    return values


def keep(job: Told) -> int:
    """Run `dtrain run` until it is done, fails, or was asked to stop."""
    post, asked = Post(job), False
    command = [sys.executable, "-m", "dtrain", "run", str(post.recipe), "--runs-dir", job["runs"], *job["arguments"]]
    end = time.monotonic() + (job["hours"] or math.inf) * 3600
    child: subprocess.Popen[bytes] | None = None

    def ask(_number: int, _frame: object) -> None:
        nonlocal asked
        if child and not asked:  # a second one would end it unsaved
            child.terminate()
        asked = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    seat = {"DTRAIN_PROCESS": job["seat"]} if job["seat"] else {}
    while True:
        child = subprocess.Popen(command, env=os.environ | seat, start_new_session=True)
        post.note("run", {"pid": child.pid, "born": born(child.pid)})
        if asked:  # while it was started
            child.terminate()
        code = _waited(child, end)
        if code is None:
            print(f"the {job['hours']:g} hours that it may take are over: it is asked to save and stop", flush=True)
            ask(signal.SIGTERM, None)
            code = child.wait()
        if asked and code == -signal.SIGTERM:  # it came before the run heard signals, or after it had saved and left
            code = PREEMPTED
        if code != PREEMPTED or asked or post.stopping.exists():
            break
        print(f"preempted; starting again in {PAUSE:.0f} s", flush=True)
        time.sleep(PAUSE)
        if asked:
            break
    post.note("end", {"code": code if code >= 0 else 128 - code, "at": time.time()})
    return 0


def _waited(child: subprocess.Popen[bytes], end: float) -> int | None:
    """How it ended; None where it takes longer than it may."""
    try:
        return child.wait(None if end == math.inf else max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return None


def kill(told: Told) -> Told:
    """Leave no process of the run on this host, and none of its small files; the run's folder stays."""
    post = Post(told)
    gone = _family(post.living())
    for pid in gone:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while any(born(pid) for pid in gone) and time.monotonic() < end:
        time.sleep(0.05)
    left = [pid for pid in gone if born(pid)]
    if left:
        raise EnvironmentFault(f"processes {left} do not end")
    if told.get("forget"):
        shutil.rmtree(post.path, ignore_errors=True)
        with suppress(OSError):
            post.path.parent.rmdir()
    return {"killed": len(gone)}


def _family(first: list[int]) -> list[int]:
    """Processes and all that they started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = list(first)
    for one in found:
        found += [child for child, parent in parents.items() if parent == one and child not in found]
    return found


def read(path: Path) -> Told | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
