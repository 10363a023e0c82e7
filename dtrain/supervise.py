"""A run under a parent: started again when it dies or hangs, as long as it gets on.

The first process to die is the cause: it is named, the rest are killed, and the run is started again from
the newest checkpoint, on another port. One that shows no sign of life for longer than it said it would is
a hang: its stacks are printed, then it counts as dead.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtrain.crew import Crew, End, port, say
from dtrain.errors import Aborted, Exhausted, Stopped
from dtrain.folder import Folder, overwrite, saved_steps
from dtrain.parallel.devices import Seat
from dtrain.parallel.meeting import LOOPBACK

LONGEST_PAUSE = 30.0
AGAIN = {70, 9}
"""Exit codes after which another start may get on, as after death by a signal. Others would come again."""
TERMINATED = 128 + signal.SIGTERM


class Others:
    """What the parents on other machines say of the run's end, in its folder, which all of them see."""

    def __init__(self, place: Folder, among: Seat | None) -> None:
        self._path, self._among = place.path / "ended.json", among
        self._before = self._said()

    def end(self) -> End | None:
        """How the run ended for good on another machine since this parent began."""
        said = self._said() if self._among else None
        if said is None or said == self._before:
            return None
        return End(said["code"], said["rank"], said["cause"], elsewhere=True)

    def tell(self, end: End) -> None:
        """Let the others leave with the same code, in place of waiting for this machine."""
        if self._among and not end.elsewhere:
            with suppress(OSError):
                said = {"code": end.code, "rank": end.rank, "cause": end.cause, "at": time.time()}
                overwrite(self._path, json.dumps(said))

    def _said(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None


@dataclass
class _Watch:
    """What the parent was asked, and whom it watches."""

    crew: Crew | None = None
    asked: int = 0


def supervise(arguments: Sequence[str], processes: int, place: Folder, restarts: int, among: Seat | None = None) -> int:
    """Run `dtrain` with these arguments in that many processes, started again up to `restarts` times without
    a newly committed step; the exit code. `among` is this machine's place among several that do the same.

    The first process speaks; what the others say is shown only where one of them dies first. Raises
    Exhausted where the run does not get on, Stopped where it was asked to stop before it had begun.
    """
    tries, reached, others = 0, -1, Others(place, among)
    with _signals() as watch:
        while True:
            end = _start(arguments, processes, place, watch, among, others)
            if watch.asked and end.code == TERMINATED:
                raise Stopped("stopped before the first step", "run the same command again to go on")
            if end.code in {0, Stopped.exit_code}:
                return end.code
            end = others.end() or end
            say(f"process {end.rank} ended first: {end.cause}")
            final = end.elsewhere or end.code == Aborted.exit_code or (end.code < 128 and end.code not in AGAIN)
            if final or watch.asked or not restarts:
                others.tell(end)
                return end.code
            committed = next(iter(saved_steps(place.checkpoints)), -1)
            tries, reached = (0, committed) if committed > reached else (tries, reached)
            if tries >= restarts:
                others.tell(replace(end, code=Exhausted.exit_code))
                times = f"{restarts} time{'s' * (restarts > 1)}"
                raise Exhausted(f"started again {times} without a new checkpoint; the last cause: {end.cause}")
            pause = min(2.0**tries, LONGEST_PAUSE) - 1
            tries += 1
            say(f"starting again from step {max(committed, 0)} ({tries} of {restarts} without a new checkpoint)")
            time.sleep(pause)


def _start(
    arguments: Sequence[str], processes: int, place: Folder, watch: _Watch, among: Seat | None, others: Others
) -> End:
    with tempfile.TemporaryDirectory(prefix="dtrain-") as logs, port() as number, Crew(Path(logs), place) as crew:
        watch.crew, machine = crew, among or Seat(0, 1, f"{LOOPBACK}:{number}")
        first, total = machine.rank * processes, machine.processes * processes
        for rank in range(first, first + processes):
            crew.start(arguments, Seat(rank, total, machine.coordinator))
        if watch.asked:
            crew.ask()
        return crew.watch(others.end)


@contextmanager
def _signals() -> Iterator[_Watch]:
    """Pass a request to stop on to every process, and start none again; the second one leaves at once."""
    watch = _Watch()

    def ask(_number: int, _frame: object) -> None:
        watch.asked += 1
        if watch.asked > 1:
            if watch.crew:
                watch.crew.kill()
            os._exit(Aborted.exit_code)
        if watch.crew:
            watch.crew.ask()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield watch
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
