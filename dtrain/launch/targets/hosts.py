"""Existing machines, with an agent of dtrain on each: the shared part of the kinds `local` and `ssh`."""

import os
import secrets
import sys
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from dtrain import __version__
from dtrain.core.errors import EnvironmentFault, LeftBehind, Locked, Stopped
from dtrain.core.files import code_digest
from dtrain.launch import registry
from dtrain.launch.fanout import Answer, Connections, Machine
from dtrain.launch.job import LaunchJob, LaunchPlan, LaunchTarget, MachineState, Say
from dtrain.launch.names import RemotePath
from dtrain.launch.wire import CODE, RUNS_HERE, HostJob, Reply

HOSTS_SHOWN = 20
STOPPED = 180.0
"""Seconds to wait for a run to save after a stop request."""
SKEW = 5.0
"""Seconds by which a clock may differ from this machine's, in addition to the uncertainty of the measurement."""

Port = Annotated[int, Ge(1024), Le(65535)]


@dataclass(frozen=True, kw_only=True)
class Hosts(LaunchTarget):
    """Base class for this machine and remote hosts: an agent of dtrain on each, and the runner that it starts."""

    files: ClassVar[Literal["shared", "own", "unknown"]] = "unknown"

    runs: RemotePath = "runs"
    """The folder of run folders on the machines; all of them must share it."""
    folder: RemotePath = "~/.dtrain"
    """Folder of the log and the runner's files on each machine; not shared."""
    python: RemotePath = "python3"
    """The Python on the machines that dtrain is installed for."""
    port: Port = 8476
    """Port of the coordinator, on the first machine."""

    @abstractmethod
    def machines(self) -> list[Machine]:
        """The machines, by rank."""

    def coordinator(self) -> str:
        """host:port of the coordinator; empty if there is one machine."""
        return ""

    def most_connections(self) -> int:
        """Largest number of connections at a time."""
        return 1

    def await_ready(self, link: Connections, say: Say) -> None:
        """Return when all machines are set up; EnvironmentFault if that takes too long."""

    def plan(self, job: LaunchJob) -> LaunchPlan:
        commands = [machine.command() for machine in self.machines()]
        return LaunchPlan({"recipe.yaml": job.recipe}, commands, len(commands), hours=self.limit())

    def describe(self) -> list[str]:
        machines = self.machines()
        where = f"run folders: {self.runs} on each host (launch.runs); --runs-dir has this machine's record"
        return [f"hosts: {names(machines)}", f"program: {machines[0].python} -m dtrain run", where]

    def find(self, job: LaunchJob) -> dict[str, str] | None:
        with self._connect(job, host=0) as link:
            (answer,) = link.ask("status")
        if failed := _problems([answer]):
            raise EnvironmentFault(failed[0])
        return {} if answer.reply.recorded or answer.reply.alive or answer.reply.code is not None else None

    def up(self, job: LaunchJob, say: Say) -> dict[str, str]:
        with self._connect(job) as link:
            self.await_ready(link, say)
            self._start(link, job, self._preflight(link, job, say))
        return {}

    def status(self, job: LaunchJob) -> list[MachineState]:
        with self._connect(job) as link:
            return _rows(link)

    def watch(self, job: LaunchJob) -> Iterator[list[MachineState]]:
        with self._connect(job) as link:
            while True:
                yield _rows(link)

    def fail(self, job: LaunchJob, host: int, *, whole: bool) -> str:
        with self._connect(job, host) as link:
            answers = link.ask("fail", whole=whole)
        if failed := _problems(answers):
            raise EnvironmentFault(failed[0])
        return answers[0].machine.name

    def read(self, job: LaunchJob, name: str) -> str:
        with self._connect(job, host=0) as link:
            answers = link.ask("read", path=name)
        if failed := _problems(answers):
            raise EnvironmentFault(failed[0])
        return answers[0].reply.text or ""

    def logs(self, job: LaunchJob, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        with self._connect(job, host) as link:
            yield from link.follow(on=follow)

    def stop(self, job: LaunchJob, say: Say) -> None:
        with self._connect(job) as link:
            failed, rows, end = _problems(link.ask("stop")), _rows(link), time.monotonic() + STOPPED
            while "running" in {row.state for row in rows}:
                if time.monotonic() > end:
                    hint = f"see `dtrain launch status {job.name}`; `down` would end it without saving"
                    raise EnvironmentFault(f"the run is still saving after {STOPPED:.0f} s", hint)
                time.sleep(0.5)
                rows = _rows(link)
        for row in rows:
            say(f"{row.name}: {row.state} {row.what}".rstrip())
        if failed:
            some = f"the others stop when they read {self.runs}/{job.name}/stop; " if len(failed) < len(rows) else ""
            raise EnvironmentFault("\n  ".join(["not every machine was reached:", *failed]), f"{some}try again")

    def down(self, job: LaunchJob, say: Say) -> None:
        with self._connect(job) as link:
            answers = link.ask("kill")
        for answer in answers:
            if not answer.reply.problem:
                say(f"{answer.machine.name}: {len(answer.reply.items)} processes ended, log removed")
        if failed := _problems(answers):
            raise EnvironmentFault(
                "\n  ".join(["not every machine was cleaned up:", *failed]), "try again when they answer"
            )

    def removes(self, job: LaunchJob) -> list[str]:
        return [f"{machine.name}: the run's processes and {self.folder}/{job.name}" for machine in self.machines()]

    def _preflight(self, link: Connections, job: LaunchJob, say: Say) -> list[Machine]:
        """Check every machine and return those to start the run on: all, or the ones that it was lost on, by a reboot
        for example, while the others wait for them. EnvironmentFault with all problems found; Locked if the run is on
        some and cannot be joined."""
        token = secrets.token_hex(6)
        looked = link.ask("preflight", token=token)
        reachable = [one.machine for one in looked if not one.reply.problem]
        seen = link.ask("folder_markers", reachable[:1], token=token)[0].reply.items if reachable else ()
        if apart := [machine for machine in reachable if machine.rank not in seen]:
            link.ask("folder_markers", apart, token=token)  # which removes their marker files
        joining = [one.machine for one in to_rejoin(looked, job.recipe)]
        if joining:  # where it is alive, it needs nothing to start
            looked = [replace(one, reply=replace(one.reply, problems=())) if one.reply.alive else one for one in looked]
        if problems := start_problems(looked, seen, self.runs):
            kind = Locked if any(RUNS_HERE in line for line in problems) else EnvironmentFault
            raise kind("\n  ".join(["not started:", *problems]))
        for line in (*skewed(looked), *other_code(looked)):
            say(line)
        if joining:
            say(f"the run was lost on {names(joining)} and is alive elsewhere: it is started there, to join the others")
        return joining or list(link.machines)

    def _start(self, link: Connections, job: LaunchJob, machines: Sequence[Machine]) -> None:
        """Start the run on the first machine before the others, because that removes an earlier stop request.

        If one machine fails, the run is killed on all of these; LeftBehind names those where it may still be running.
        """
        request = {"recipe": job.recipe, "environment": job.environment()}
        request["environment"] |= {name: os.environ[name] for name in self.environment}
        answers = link.ask("start", machines[:1], record=registry.text(job), **request)
        answers += link.ask("start", machines[1:], **request) if not _problems(answers) else []
        if failed := _problems(answers):  # a silent one may have started; an earlier run stays
            started = [one.machine for one in answers if RUNS_HERE not in one.reply.problem]
            left = [one.machine for one in link.ask("kill", started) if one.reply.problem]
            hint = f"it may be running on {names(left)}" if left else "nothing was left running"
            kind = LeftBehind if left else EnvironmentFault
            raise kind("\n  ".join(["the run did not start:", *failed]), hint)

    def _connect(self, job: LaunchJob, host: int | None = None) -> Connections:
        machines = self.machines()
        part = HostJob(
            name=job.name, folder=self.folder, runs=self.runs, arguments=tuple(self.run_options(job)),
            world_size=len(machines), coordinator=self.coordinator(),
        )  # fmt: skip
        chosen = [machine for machine in machines if host in (None, machine.rank)]
        return Connections(chosen, self.most_connections(), part)


@dataclass(frozen=True, kw_only=True)
class Local(Hosts):
    """This machine: the run continues when the terminal is closed."""

    kind: Literal["local"] = "local"
    keeps_environment: ClassVar[bool] = True
    files: ClassVar[Literal["shared", "own", "unknown"]] = "shared"

    def machines(self) -> list[Machine]:
        python = sys.executable if self.python == "python3" else str(Path(self.python).expanduser())
        return [Machine(0, "here", (), python)]


def names(machines: Sequence[Machine]) -> str:
    """Names of the first machines, and how many more there are."""
    more = f" and {len(machines) - HOSTS_SHOWN:,} more" if len(machines) > HOSTS_SHOWN else ""
    return ", ".join(machine.name for machine in machines[:HOSTS_SHOWN]) + more


def start_problems(looked: Sequence[Answer], seen: Collection[int], runs: str) -> list[str]:
    """Every problem with its host: first those of single hosts, then those between hosts. `seen` are the ranks whose
    marker files are in the first host's folder of runs."""
    reachable = [one for one in looked if not one.reply.problem]
    problems = [
        *_problems(looked),
        *(f"{one.machine.name}: {line}" for one in reachable for line in one.reply.problems),
    ]
    problems += [
        f"{one.machine.name} has {package} {version}, {first.machine.name} has {first.reply.versions[package]}"
        for first in reachable[:1]
        for one in reachable[1:]
        for package, version in one.reply.versions.items()
        if version != first.reply.versions[package]
    ]
    apart = [one.machine.name for one in looked if one.machine.rank not in seen and not problems]
    shared = f"{runs} of {looked[0].machine.name}: it must be one shared folder"
    return problems + [f"{name} does not write to the folder {shared}" for name in apart]


def to_rejoin(looked: Sequence[Answer], recipe: str) -> list[Answer]:
    """The machines that this run was lost on, if it is alive on all others and waits for them there; else none.

    It is lost where it has no exit code, or the one of a preemption or of a signal, as a reboot leaves it."""
    gone = [one for one in looked if not one.reply.alive]
    alive = [one for one in looked if one.reply.alive]
    lost = [one.reply.code is None or one.reply.code == Stopped.exit_code or one.reply.code > 128 for one in gone]
    return gone if alive and all(lost) and all(one.reply.recipe == recipe for one in alive) else []


def other_code(looked: Sequence[Answer]) -> list[str]:
    """A note if the first host has another dtrain than this machine; hosts that differ are a problem anyway."""
    for one in looked[:1]:
        there = one.reply.versions
        if there.get(CODE, code_digest()) != code_digest():
            here = f"{__version__} (code {code_digest()})"
            return [
                f"the hosts run another dtrain than this machine: {there['dtrain']} (code {there[CODE]}), here {here}"
            ]
    return []


def skewed(looked: Sequence[Answer]) -> list[str]:
    """Notes on clocks that are wrong, by the time at which each host was asked."""
    off = {one.machine.name: one.reply.time - one.asked for one in looked}
    wrong = [one.machine.name for one in looked if abs(off[one.machine.name]) > one.uncertainty + SKEW]
    if len(wrong) == len(looked) > 1:
        return [f"this machine's clock differs from those of all hosts, by {min(off.values()):+.0f} s and more"]
    return [f"the clock of {name} is {off[name]:+.0f} s off; times in its log are wrong" for name in wrong]


def _problems(answers: Sequence[Answer]) -> list[str]:
    return [f"{one.machine.name}: {one.reply.problem}" for one in answers if one.reply.problem]


def _rows(link: Connections) -> list[MachineState]:
    return [row_of(answer) for answer in link.ask("status")]


def row_of(answer: Answer) -> MachineState:
    name, reply = answer.machine.name, answer.reply
    return MachineState(name, *_state_of(reply), heartbeat=reply.heartbeat)


def _state_of(reply: Reply) -> tuple[str, str, int | None]:
    """The state of a machine, its description, and the run's exit code."""
    text = reply.text or ""
    if reply.alive:
        return "running", text, None
    if reply.problem:
        return "unreachable", reply.problem, EnvironmentFault.exit_code
    if reply.code is None:
        reason = f"its runner died without an exit code; {text}".rstrip("; ")
        return "lost", reason, EnvironmentFault.exit_code
    if reply.code == Stopped.exit_code or (reply.code == 0 and reply.state == "stopped"):
        return "stopped", text, 0  # by the signal or by the stop request, whichever came first
    return "ended", f"exit code {reply.code}, {text}".rstrip(", "), reply.code
