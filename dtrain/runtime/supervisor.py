"""A run under a parent: started again when it dies or hangs, as long as it gets on.

The first process to die is the cause: it is named, the rest are killed, and the run is started again from
the newest checkpoint, on another port. One that shows no sign of life for longer than it said it would is
a hang: its stacks are printed, then it counts as dead.
"""

import json
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dtrain.core import signals
from dtrain.core.errors import Aborted, DtrainError, Exhausted, HostLost, Stopped
from dtrain.core.process_info import RENDEZVOUS_S, ProcessInfo, launch_id, rendezvous_seconds, replaces_hosts
from dtrain.core.run_control import note_end
from dtrain.core.run_dir import Folder, overwrite, saved_steps
from dtrain.parallel.rendezvous import LOOPBACK, PATIENCE
from dtrain.runtime.process_group import End, ProcessGroup, port, say

LONGEST_PAUSE = 30.0
AGAIN = {70, 9}
"""Exit codes after which another start may get on, as after death by a signal. Others would come again."""
TERMINATED = 128 + signal.SIGTERM
RETURN = 120.0
"""Seconds that a restart waits for the other hosts where the engine replaces those that are lost. All notice a death
within seconds; what is waited for is the start of Python."""


class Others:
    """What the parents on other machines say of the run's end, in its folder, which all of them see: an end for good,
    or a stop before the processes had met, of which those that wait would not learn."""

    def __init__(self, place: Folder, among: ProcessInfo | None) -> None:
        self._path, self._among = place.path / "ended.json", among
        self._before = self._report()

    def end(self) -> End | None:
        """How the run ended on another machine since this parent began."""
        output = self._report() if self._among else None
        if output is None or output == self._before:
            return None
        return End(output["code"], output["rank"], output["cause"], elsewhere=True)

    def report(self, end: End) -> None:
        """Let the others leave with the same code, in place of waiting for this machine."""
        if self._among and not end.elsewhere:
            with suppress(OSError):
                output = {"code": end.code, "rank": end.rank, "cause": end.cause, "at": time.time()}
                self._path.parent.mkdir(parents=True, exist_ok=True)
                overwrite(self._path, json.dumps(output))

    def _report(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None


@dataclass
class _Watch:
    """The signals that the parent got, and the processes that it watches."""

    group: ProcessGroup | None = None
    asked: int = 0
    woken: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Restarts:
    """Restarts without a new checkpoint. The starts of a launched run are counted in its folder, by its first process
    (`run_control.py`): the limit here is then one more, for a host that does not reach the first one any more."""

    limit: int
    launched: bool
    _count: int = 0
    _newest: int = -1

    def again(self, place: Folder, cause: str) -> float:
        """Seconds until the next start. Exhausted where there were too many."""
        committed, limit = next(iter(saved_steps(place.checkpoints)), -1), self.limit + self.launched
        if committed > self._newest:
            self._count, self._newest = 0, committed
        if self._count >= limit:
            times = f"{limit} time{'s' * (limit > 1)}"
            raise Exhausted(f"started again {times} without a new checkpoint; the last cause: {cause}")
        pause, self._count = min(2.0**self._count, LONGEST_PAUSE) - 1, self._count + 1
        counted = "" if self.launched else f" ({self._count} of {limit} without a new checkpoint)"
        say(f"starting again from step {max(committed, 0)}{counted}")
        return pause


def supervise(
    arguments: Sequence[str], processes: int, place: Folder, restarts: int, among: ProcessInfo | None = None
) -> int:
    """Run `dtrain` with these arguments in that many processes, started again up to `restarts` times without
    a newly committed step; the exit code. `among` is this machine's place among several that do the same.

    The first process speaks; what the others say is shown only where one of them dies first. Raises
    Exhausted where the run does not get on, Stopped where it was asked to stop before it had begun.
    """
    others, again = Others(place, among), _Restarts(restarts, bool(launch_id()))
    replaced, more = bool(among) and replaces_hosts(), dict[str, str]()
    with _signals(place) as watch:
        while True:
            end = _start(arguments, processes, place, watch, among, others, more)
            with signals.held():  # a second signal that is being handled ends this process
                pass
            if watch.asked and end.code == TERMINATED:
                return _stopped(place, others)
            if end.unstarted:
                others.report(end)
            if end.code == Stopped.exit_code:  # of a start that was stopped before it wrote its own end
                _note(place, "stopped", "stopped before the first step of this start", Stopped.exit_code)
            if end.code in {0, Stopped.exit_code}:
                if end.elsewhere:
                    say(f"stopped: process {end.rank}, on another host: {end.cause}")
                return end.code
            end = others.end() or end
            say(f"process {end.rank} ended first: {end.cause}")
            if replaced and end.peer and not restarts and not watch.asked:
                note_end(place, HostLost(f"another host is lost: {end.cause}"))
                return Stopped.exit_code
            final = end.elsewhere or end.code == Aborted.exit_code or (end.code < 128 and end.code not in AGAIN)
            if final or watch.asked or not restarts:
                others.report(end)
                return end.code
            try:
                pause = again.again(place, end.cause)
            except Exhausted:
                others.report(replace(end, code=Exhausted.exit_code))
                raise
            if replaced:
                more = {RENDEZVOUS_S: str(min(rendezvous_seconds(PATIENCE), RETURN))}
            if watch.woken.wait(pause):
                return _stopped(place, others)


def _stopped(place: Folder, others: Others) -> int:
    """A stop that the run itself did not see, since it had not begun or was at its end; the exit code."""
    if place.read_record().get("state") == "finished":
        return 0
    committed = next(iter(saved_steps(place.checkpoints)), 0)
    reason = f"stopped at step {committed}, saved" if committed else "stopped before the first step"
    _note(place, "stopped", reason, Stopped.exit_code)
    others.report(End(Stopped.exit_code, cause="asked to stop"))
    raise Stopped(reason, "run the same command again to continue")


def _note(place: Folder, state: str, reason: str, code: int) -> None:
    """Write the end into run.json where the run itself could not, and its state is still `running`."""
    with suppress(DtrainError, OSError):
        record = place.read_record()
        if record.get("state") == "running":
            place.write_record(record | {"state": state, "reason": reason, "exit_code": code, "ended": time.time()})


def _start(
    arguments: Sequence[str],
    processes: int,
    place: Folder,
    watch: _Watch,
    among: ProcessInfo | None,
    others: Others,
    more: Mapping[str, str],
) -> End:
    with (
        tempfile.TemporaryDirectory(prefix="dtrain-") as logs,
        port() as number,
        ProcessGroup(Path(logs), place) as group,
    ):
        watch.group, machine = group, among or ProcessInfo(0, 1, f"{LOOPBACK}:{number}")
        first, total = machine.rank * processes, machine.world_size * processes
        for rank in range(first, first + processes):
            group.start(arguments, ProcessInfo(rank, total, machine.coordinator), more)
        if watch.asked:
            group.ask()
        return group.watch(others.end)


@contextmanager
def _signals(place: Folder) -> Iterator[_Watch]:
    """Pass a request to stop on to every process, and start none again. SIGTERM is one request however often it
    comes; a second request by Ctrl-C leaves at once."""
    watch = _Watch()

    def react(number: int) -> None:
        if watch.asked and number == signal.SIGTERM:
            return
        watch.asked += 1
        watch.woken.set()
        if watch.asked > 1:
            if watch.group:
                watch.group.kill()
            _note(place, "aborted", "left at once", Aborted.exit_code)
            signals.leave(Aborted.exit_code, "")
        if watch.group:
            watch.group.ask()

    with signals.reacting(react):
        yield watch
    signals.settle()
