"""Supervise a run: restart it after a crash or a hang, as long as it makes progress.

The first process that fails is reported as the cause, the rest are killed, and the run restarts from the newest
checkpoint, on another port. A process that sends no heartbeat for longer than the last one announced hangs: the stacks
are printed, then it is treated as failed.
"""

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace

from dtrain.core import heartbeat, signals
from dtrain.core.counts import counted
from dtrain.core.errors import Aborted, DtrainError, Exhausted, HostLost, Stopped
from dtrain.core.files import overwrite
from dtrain.core.leftovers import temporary_folder
from dtrain.core.process_info import RENDEZVOUS_S, ProcessInfo, launch_id, rendezvous_seconds, replaces_hosts
from dtrain.core.run_control import note_end
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.core.types import JsonObject
from dtrain.parallel.rendezvous import LOOPBACK, PATIENCE
from dtrain.runtime.process_group import End, ProcessGroup, port, say
from dtrain.runtime.standbys import Standbys

LONGEST_PAUSE = 30.0
"""Longest pause before a restart, in seconds."""
AGAIN = {70, 9}
"""Exit codes after which a restart may help, as after a kill by a signal. Other errors would occur again."""
TERMINATED = 128 + signal.SIGTERM
RETURN = 120.0
"""Seconds that a restart waits for the other hosts if the engine replaces lost hosts. All hosts notice a failure within
seconds; the wait is for Python to start."""


class PeerSupervisors:
    """Exchanges with the supervisors on other machines, through a file in the shared run folder, how the run ended.

    A final end, or a stop before the rendezvous, which waiting processes would not notice otherwise.
    """

    def __init__(self, run_dir: Folder, among: ProcessInfo | None) -> None:
        self._path, self._among = run_dir.path / "ended.json", among
        self._before = self._read()

    def end(self) -> End | None:
        """How the run ended on another machine since this supervisor started; None if it did not."""
        reported = self._read() if self._among else None
        if reported is None or reported == self._before:
            return None
        return End(reported["code"], reported["rank"], reported["cause"], remote=True)

    def report(self, end: End) -> None:
        """Make the other supervisors exit with the same code instead of waiting for this machine."""
        if self._among and not end.remote:
            with suppress(OSError):
                report = {"code": end.code, "rank": end.rank, "cause": end.cause, "at": time.time()}
                self._path.parent.mkdir(parents=True, exist_ok=True)
                overwrite(self._path, json.dumps(report))

    def _read(self) -> JsonObject | None:
        try:
            return json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None


@dataclass
class _Watch:
    """The stop requests that the supervisor received, and the processes that it supervises."""

    group: ProcessGroup | None = None
    asked: int = 0
    woken: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Restarts:
    """Counts restarts without a new checkpoint.

    The starts of a launched run are also counted in its folder, by process 0 (`run_control.py`). The limit here is then
    one higher, and only bounds a host that cannot reach process 0 any more.
    """

    limit: int
    launched: bool
    copies: bool = False
    """Whether the run has copies of its state in memory."""
    _count: int = 0
    _newest: int = -1

    def pause(self, run_dir: Folder, rank: int, cause: str) -> float:
        """Seconds until the next start: 0, 1, 3, 7, ... Raises Exhausted if the limit is reached.

        `rank`: of the first process here, whose heartbeat has the step of the copy that it resumed from, if any."""
        saved, latest = next(iter(saved_steps(run_dir.checkpoints)), -1), heartbeat.read(run_dir.heartbeat(rank))
        committed, limit = max(saved, latest.first if latest else -1), self.limit + self.launched
        if committed > self._newest:
            self._count, self._newest = 0, committed
        if self._count >= limit:
            times = counted(limit, "time")
            raise Exhausted(f"restarted {times} without a new checkpoint; last cause: {cause}")
        pause, self._count = min(2.0**self._count, LONGEST_PAUSE) - 1, self._count + 1
        of_limit = "" if self.launched else f" ({self._count} of {limit} without a new checkpoint)"
        say(f"restarting from step {max(saved, 0)}{' or a newer copy' * self.copies}{of_limit}")
        return pause


def supervise(
    arguments: Sequence[str],
    processes: int,
    run_dir: Folder,
    restarts: int,
    among: ProcessInfo | None = None,
    copies: bool = False,
) -> int:
    """Run `dtrain` with these arguments in `processes` processes and return the exit code.

    The run is restarted at most `restarts` times in a row without a new checkpoint. `among` is the rank of this machine
    among several that do the same. The output of the first process is shown; that of another one only if it fails
    first. `copies`: whether the run has copies of its state in memory; then as many processes more wait to replace
    those that fail, with all imports done. Raises Exhausted if the limit of restarts is reached, Stopped if the run was
    asked to stop before it started.
    """
    others, budget = PeerSupervisors(run_dir, among), _Restarts(restarts, bool(launch_id()), copies)
    rank = among.rank * processes if among else 0
    replaced, more = bool(among) and replaces_hosts(), dict[str, str]()
    together = bool(among) or processes > 1
    waiting = Standbys(arguments, processes if copies and restarts else 0, together=together)
    with _signals(run_dir) as watch, closing(waiting):
        while True:
            end = _start(
                arguments, processes, run_dir, watch=watch, among=among, others=others, more=more, waiting=waiting
            )
            with signals.held():  # wait for a signal that is being handled: a second one ends this process
                pass
            if watch.asked and end.code == TERMINATED:
                return _stopped(run_dir, others)
            if end.unstarted:
                others.report(end)
            if end.code == Stopped.exit_code:  # if it stopped before it wrote its end itself
                _note(run_dir, "stopped", "stopped before the first step of this start", Stopped.exit_code)
            if end.code in {0, Stopped.exit_code}:
                if end.remote:
                    say(f"stopped: process {end.rank}, on another host: {end.cause}")
                return end.code
            end = others.end() or end
            say(f"process {end.rank} ended first: {end.cause}")
            if replaced and end.peer and not restarts and not watch.asked:
                note_end(run_dir, HostLost(f"another host is lost: {end.cause}"))
                return Stopped.exit_code
            final = end.remote or end.code == Aborted.exit_code or (end.code < 128 and end.code not in AGAIN)
            if final or watch.asked or not restarts:
                others.report(end)
                _note(run_dir, "aborted" if end.code == Aborted.exit_code else "failed", end.cause, end.code)
                return end.code
            try:
                pause = budget.pause(run_dir, rank, end.cause)
            except Exhausted as error:
                others.report(replace(end, code=Exhausted.exit_code))
                _note(run_dir, "failed", error.message, Exhausted.exit_code)
                raise
            if replaced:
                more = {RENDEZVOUS_S: str(min(rendezvous_seconds(PATIENCE), RETURN))}
            if watch.woken.wait(pause):
                return _stopped(run_dir, others)


def _stopped(run_dir: Folder, others: PeerSupervisors) -> int:
    """Report a stop that the run itself did not handle, since it had not started or was ending; the exit code."""
    if run_dir.read_record().get("state") == "finished":
        return 0
    committed = next(iter(saved_steps(run_dir.checkpoints)), 0)
    reason = f"stopped at step {committed}, saved" if committed else "stopped before the first step"
    _note(run_dir, "stopped", reason, Stopped.exit_code)
    others.report(End(Stopped.exit_code, cause="asked to stop"))
    raise Stopped(reason, "run the same command again to resume")


def _note(run_dir: Folder, state: str, reason: str, code: int) -> None:
    """Write the end into run.json if the run itself could not: its state there is still `running`."""
    with suppress(DtrainError, OSError):
        record = run_dir.read_record()
        if record.get("state") == "running":
            run_dir.write_record(record | {"state": state, "reason": reason, "exit_code": code, "ended": time.time()})
            with run_dir.log.open("a") as file:
                file.write(f"{'error' if state == 'failed' else 'stopped'}: {reason}\n")


def _start(
    arguments: Sequence[str],
    processes: int,
    run_dir: Folder,
    watch: _Watch,
    among: ProcessInfo | None,
    others: PeerSupervisors,
    more: Mapping[str, str],
    waiting: Standbys,
) -> End:
    with (
        temporary_folder("logs") as logs,
        port() as number,
        ProcessGroup(logs, run_dir, standbys=waiting) as group,
    ):
        watch.group, machine = group, among or ProcessInfo(0, 1, f"{LOOPBACK}:{number}")
        first, total = machine.rank * processes, machine.world_size * processes
        for rank in range(first, first + processes):
            group.start(arguments, ProcessInfo(rank, total, machine.coordinator), more)
        if watch.asked:
            group.ask()

        def ended_elsewhere() -> End | None:
            if waiting.missing and group.trains:  # not before: they would compete for the processor
                waiting.fill()
            return others.end()

        return group.watch(ended_elsewhere)


@contextmanager
def _signals(run_dir: Folder) -> Iterator[_Watch]:
    """Forward a stop request to every process, and restart none. Repeated SIGTERMs are one request; a second request by
    Ctrl-C kills all processes and exits at once."""
    watch = _Watch()

    def react(number: int) -> None:
        if watch.asked and number != signal.SIGINT:
            return
        watch.asked += 1
        watch.woken.set()
        if watch.asked > 1:
            if watch.group:
                watch.group.kill()
            _note(run_dir, "aborted", "stopped at once, without saving", Aborted.exit_code)
            signals.leave(Aborted.exit_code, "")
        if watch.group:
            watch.group.ask()

    with signals.reacting(react):
        yield watch
    signals.settle()
