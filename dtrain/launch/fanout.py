"""The same question to many machines at once, each answer with its machine; what they say, line by line."""

import json
import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

AGAIN = 2.0
"""Seconds until a lost connection is tried again."""
SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"),
    *("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR"),
)
"""A machine that does not answer is told in three to four seconds."""


@dataclass(frozen=True)
class Machine:
    """One machine of a run, by rank."""

    rank: int
    name: str
    prefix: tuple[str, ...] = ()
    """What reaches it; nothing where it is this one."""
    python: str = "python3"

    def command(self, verb: str) -> list[str]:
        """The argv that asks its agent."""
        asked = [self.python, "-m", "dtrain.launch.agent", verb]
        home = "~/" if self.python.startswith("~/") else ""  # which the shell there fills in, where it is not quoted
        there = f"{home}{shlex.join([self.python.removeprefix('~/'), *asked[1:]])}"
        return [*self.prefix, there] if self.prefix else asked


@dataclass(frozen=True)
class Answer:
    """What a machine answered, or why it did not."""

    machine: Machine
    value: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def ask(
    machines: Sequence[Machine], verb: str, told: Callable[[Machine], Mapping[str, Any]], wait: float
) -> list[Answer]:
    """All at once; in the order of the machines."""
    with ThreadPoolExecutor(max(len(machines), 1)) as pool:
        return list(pool.map(lambda machine: _ask(machine, verb, told(machine), wait), machines))


def _ask(machine: Machine, verb: str, told: Mapping[str, Any], wait: float) -> Answer:
    try:
        done = subprocess.run(
            machine.command(verb), input=json.dumps(told), capture_output=True, text=True, timeout=wait, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(machine, problem=f"no answer in {wait:.0f} s")
    except OSError as error:
        return Answer(machine, problem=f"{error.filename or machine.command(verb)[0]}: {error.strerror}")
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        found = json.loads(last)
        return Answer(machine, found["answer"]) if "answer" in found else Answer(machine, problem=found["error"])
    except (ValueError, KeyError, TypeError):  # ssh itself failed, or Python did: 255 would not say which
        return Answer(machine, problem=_reason(done.stderr, machine))


def _reason(said: str, machine: Machine) -> str:
    if "No module named" in said and "dtrain" in said:
        return f"dtrain is not installed for {machine.python} there"
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "the connection was lost"


@dataclass(frozen=True)
class Line:
    """One line of a machine's log, or what became of it."""

    machine: Machine
    text: str = ""
    end: Mapping[str, Any] | None = None
    """How the run ended there."""
    lost: str = ""
    """Why it cannot be heard."""
    again: bool = False
    """It is heard again."""


def follow(machines: Sequence[Machine], told: Callable[[Machine], Mapping[str, Any]], *, on: bool) -> Iterator[Line]:
    """What the machines say as they say it; with `on` until the run ended on each, through lost connections."""
    lines: queue.Queue[Line | None] = queue.Queue()
    listeners = [_Listener(machine, dict(told(machine)), on, lines) for machine in machines]
    for listener in listeners:
        threading.Thread(target=listener.listen, daemon=True).start()
    left = len(listeners)
    try:
        while left:
            line = lines.get()
            if line is None:
                left -= 1
            else:
                yield line
    finally:
        for listener in listeners:
            listener.leave()


@dataclass
class _Listener:
    machine: Machine
    told: dict[str, Any]
    on: bool
    lines: "queue.Queue[Line | None]"
    process: subprocess.Popen[str] | None = None
    left: bool = False
    lost: bool = False

    def listen(self) -> None:
        """Until the log's end, or with one that is not followed until the connection's."""
        while not self.left:
            end, problem = self._hear()
            if end is not None:
                self.lines.put(Line(self.machine, end=end))
                break
            if not self.lost:
                self.lines.put(Line(self.machine, lost=problem))
            self.lost = True
            if not self.on:
                break
            time.sleep(AGAIN)
        self.lines.put(None)

    def _hear(self) -> tuple[Mapping[str, Any] | None, str]:
        command = self.machine.command("logs")
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                errors="replace",
            )  # fmt: skip
        except OSError as error:
            return None, f"{error.filename}: {error.strerror}"
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stderr
        with suppress(BrokenPipeError):
            json.dump(self.told, self.process.stdin)
            self.process.stdin.close()
        for line in self.process.stdout:
            with suppress(ValueError):  # a banner of the machine's own
                found = json.loads(line)
                if self.lost:
                    self.lines.put(Line(self.machine, again=True))
                    self.lost = False
                if "ended" in found:
                    return found["ended"], ""
                self.told["offset"] = found["offset"]
                self.lines.put(Line(self.machine, found["text"]))
        return None, _reason(self.process.stderr.read(), self.machine)

    def leave(self) -> None:
        """Hang up."""
        self.left = True
        if self.process:
            self.process.kill()
