"""Machines that are there already: this one, or any that ssh reaches."""

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen

from dtrain.errors import EnvironmentFault, FieldError, Locked
from dtrain.fields import PositiveFloat
from dtrain.launch.fanout import SSH, Answer, Line, Machine, ask, follow
from dtrain.launch.job import Common, Job, Plan, Row, Say
from dtrain.launch.names import Host, RemotePath
from dtrain.launch.preflight import THERE, in_the_way, skewed
from dtrain.launch.roll import where

GONE = EnvironmentFault.exit_code
WAIT = 30.0
"""Seconds in which a machine answers; ssh itself gives up sooner."""
STOPPED = 180.0
"""Seconds in which a run that was asked to stop has saved."""

Port = Annotated[int, Ge(1024), Le(65535)]
Told = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Hosts(Common, ABC):
    """What this machine and others have in common: an agent of dtrain on each, that keeps the run."""

    runs: RemotePath = "runs"
    """The folder of run folders on the machines; all of them see the same one."""
    folder: RemotePath = "~/.dtrain"
    """Where each machine keeps its log and its small files; its own, not shared."""
    python: RemotePath = "python3"
    """The Python there that dtrain is installed for."""
    hours: PositiveFloat | None = None
    """How long the run may take; it is asked to save and stop then."""
    port: Port = 8476
    """On the first machine, where all meet."""

    @abstractmethod
    def machines(self) -> list[Machine]:
        """By rank."""

    @abstractmethod
    def address(self) -> str:
        """Where the processes meet; empty where there is one machine."""

    def plan(self, job: Job) -> Plan:
        machines = self.machines()
        steps = [machine.command(verb) for verb in ("look", "met", "start") for machine in machines]
        return Plan({"recipe.yaml": job.recipe}, steps, len(machines))

    def up(self, job: Job, say: Say) -> dict[str, str]:
        machines = self.machines()
        self._preflight(job, machines, say)
        secret = {name: os.environ[name] for name in self.environment}
        answers = self._ask("start", job, machines, environment=secret)
        failed = [f"{one.machine.name}: {one.problem}" for one in answers if one.problem]
        if failed:  # one that did not answer may have begun all the same; one where it ran before is left alone
            begun = [one.machine for one in answers if THERE not in one.problem]
            ended = self._ask("kill", job, begun, forget=True)
            left = ", ".join(one.machine.name for one in ended if one.problem)
            hint = f"it may be running on {left}" if left else "nothing was left running"
            raise EnvironmentFault("the run did not start:\n  " + "\n  ".join(failed), hint)
        return {}

    def status(self, job: Job) -> list[Row]:
        return [_row(answer) for answer in self._ask("status", job, self.machines())]

    def logs(self, job: Job, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        chosen = [machine for machine in self.machines() if host in (None, machine.rank)]
        told = lambda machine: self._told(job, machine) | {"follow": follow}  # noqa: E731
        return _said(chosen, told, follow)

    def stop(self, job: Job, say: Say) -> None:
        silent = [
            f"{one.machine.name}: {one.problem}" for one in self._ask("stop", job, self.machines()) if one.problem
        ]
        if silent:
            hint = "ask again when they answer: until then they start the run again"
            raise EnvironmentFault("\n  ".join(["not every machine could be asked:", *silent]), hint)
        end = time.monotonic() + STOPPED
        while time.monotonic() < end:
            rows = self.status(job)
            if not any(row.state == "running" for row in rows):
                for row in rows:
                    say(f"{row.name}: {row.state} {row.what}".rstrip())
                return
            time.sleep(0.5)
        hint = f"dtrain launch status {job.name}; `down` would end it unsaved"
        raise EnvironmentFault(f"it is still saving after {STOPPED:.0f} s", hint)

    def down(self, job: Job, say: Say) -> None:
        failed = []
        for answer in self._ask("kill", job, self.machines(), forget=True):
            if answer.problem:
                failed.append(f"{answer.machine.name}: {answer.problem}")
            else:
                say(f"{answer.machine.name}: {answer.value['killed']} processes ended, log removed")
        if failed:
            raise EnvironmentFault(
                "not all could be taken down:\n  " + "\n  ".join(failed), "try again when they answer"
            )

    def removes(self, job: Job) -> list[str]:
        return [f"{machine.name}: the run's processes and {self.folder}/{job.name}" for machine in self.machines()]

    def _preflight(self, job: Job, machines: list[Machine], say: Say) -> None:
        """EnvironmentFault with all that is in the way, on every machine; Locked where the run is there already."""
        token = secrets.token_hex(6)
        looked = self._ask("look", job, machines, token=token)
        met = self._ask("met", job, machines, token=token)
        self._ask("met", job, machines, token=token, clear=True)
        problems = [f"{name} is not set here" for name in self.environment if name not in os.environ]
        problems += in_the_way(looked, met, self.runs)
        if problems:
            kind = Locked if any(THERE in line for line in problems) else EnvironmentFault
            raise kind("\n  ".join(["not started:", *problems]))
        for line in skewed(looked):
            say(line)

    def _ask(self, verb: str, job: Job, machines: list[Machine], **more: Any) -> list[Answer]:
        return ask(machines, verb, lambda machine: self._told(job, machine) | more, WAIT)

    def _told(self, job: Job, machine: Machine) -> Told:
        machines = len(self.machines())
        return {
            "name": job.name,
            "recipe": job.recipe,
            "runs": self.runs,
            "folder": self.folder,
            "rank": machine.rank,
            "port": self.port,
            "seat": f"{machine.rank}/{machines}@{self.address()}" if machines > 1 else "",
            "arguments": self.run_options(),
            "hours": self.hours,
            "environment": {},
        }


@dataclass(frozen=True, kw_only=True)
class Local(_Hosts):
    """This machine: the run goes on when the terminal is closed."""

    kind: Literal["local"] = "local"

    def machines(self) -> list[Machine]:
        import sys

        python = sys.executable if self.python == "python3" else str(Path(self.python).expanduser())
        return [Machine(0, "here", (), python)]

    def address(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class Ssh(_Hosts):
    """Machines that ssh reaches without a question, the first of which is where all meet."""

    kind: Literal["ssh"] = "ssh"
    hosts: Annotated[tuple[Host, ...], MinLen(1)]
    """Names or IPv4 addresses, with user@ where it is not yours; the order gives the ranks."""
    identity: str | None = None
    """A key file, where ssh would not find it."""
    known_hosts: str | None = None
    """A file of host keys in place of your own; a key that is not in it is refused, as always."""

    def __post_init__(self) -> None:
        twice = {host for host in self.hosts if self.hosts.count(host) > 1}
        if twice:
            raise FieldError("hosts", f"{min(twice)} is named twice")

    def machines(self) -> list[Machine]:
        options = list(SSH)
        options += ["-i", str(Path(self.identity).expanduser())] if self.identity else []
        options += ["-o", f"UserKnownHostsFile={Path(self.known_hosts).expanduser()}"] if self.known_hosts else []
        return [Machine(rank, host, (*options, "--", host), self.python) for rank, host in enumerate(self.hosts)]

    def address(self) -> str:
        return f"{self.hosts[0].rpartition('@')[2]}:{self.port}"


def _row(answer: Answer) -> Row:
    name, value = answer.machine.name, answer.value
    if answer.problem:
        return Row(name, "lost", answer.problem, GONE)
    run, end = value["run"], value["end"]
    step = f"step {run['step']}/{run['steps']} saved" if run["steps"] else ""
    if end and not value["alive"]:
        return Row(name, "ended", f"exit code {end['code']}, {step}".rstrip(", "), end["code"])
    if not value["alive"]:
        return Row(name, "lost", f"its keeper is gone; {step}".rstrip("; "), GONE)
    return Row(name, "running", where(value["sign"], run, value["now"]))


def _said(machines: list[Machine], told: Callable[[Machine], Mapping[str, Any]], on: bool) -> Iterator[tuple[str, str]]:
    for line in follow(machines, told, on=on):
        yield line.machine.name, _text(line)


def _text(line: Line) -> str:
    if line.lost:
        return f"-- not heard: {line.lost}"
    if line.again:
        return "-- heard again"
    if line.end is None:
        return line.text
    return f"-- ended: exit code {line.end['code']}" if line.end else "-- no end was noted"
