"""Local processes that train together: start them, watch them, take them down together, start them again.

The first to die is the cause: it is named, the rest are killed, and the run is started again from the
newest checkpoint, on another port, as long as it gets on. A process that shows no sign of life for
longer than it said it would is a hang: its stacks are printed, then it counts as dead.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dtrain import beat
from dtrain.errors import Aborted, EnvironmentFault, Exhausted, Hung, Stopped
from dtrain.folder import Folder
from dtrain.parallel.devices import PARENT, PROCESS, Seat

POLL = 0.02
LOOK = 0.5
"""Seconds between looks at the signs of life."""
GRACE = 120.0
"""Seconds that processes which agreed to stop are given to save."""
TAIL = 12
LONGEST_PAUSE = 30.0
AGAIN = {70, 9}
"""Exit codes after which another start may get on, as after death by a signal. Others would come again."""


@dataclass(frozen=True)
class End:
    """How one start of the run ended: the exit code, which process was first, and why."""

    code: int
    rank: int = 0
    cause: str = ""


def supervise(arguments: Sequence[str], processes: int, place: Folder, restarts: int) -> int:
    """Run `dtrain` with these arguments in that many processes, started again up to `restarts` times without
    a newly committed step; the exit code.

    The first process speaks; what the others say is shown only where one of them dies first. Raises
    Exhausted where the run does not get on.
    """
    tries, reached = 0, -1
    while True:
        end = _start(arguments, processes, place)
        if end.code in {0, Stopped.exit_code}:
            return end.code
        _say(f"process {end.rank} ended first: {end.cause}")
        committed = _committed(place)
        tries, reached = (0, committed) if committed > reached else (tries, reached)
        if end.code < 128 and end.code not in AGAIN:
            return end.code
        if tries >= restarts:
            if not restarts:
                return end.code
            times = f"{restarts} time{'s' * (restarts > 1)}"
            raise Exhausted(f"started again {times} without a new checkpoint; the last cause: {end.cause}")
        pause = min(2.0**tries, LONGEST_PAUSE) - 1
        tries += 1
        _say(f"starting again from step {max(committed, 0)} ({tries} of {restarts} without a new checkpoint)")
        time.sleep(pause)


def _start(arguments: Sequence[str], processes: int, place: Folder) -> End:
    with tempfile.TemporaryDirectory(prefix="dtrain-") as logs, _Crew(Path(logs), place) as crew:
        address = f"127.0.0.1:{_free_port()}"
        for rank in range(processes):
            crew.start(arguments, Seat(rank, processes, address))
        return crew.watch()


def _committed(place: Folder) -> int:
    """The newest step on disk."""
    found = place.checkpoints.iterdir() if place.checkpoints.is_dir() else ()
    return max((int(path.name) for path in found if path.name.isdecimal()), default=-1)


@dataclass
class _Crew:
    """The processes, by rank."""

    logs: Path
    place: Folder
    members: list[subprocess.Popen[bytes]] = field(default_factory=list)
    relays: list[threading.Thread] = field(default_factory=list)
    asked: int = 0
    signs: dict[int, tuple[int, float]] = field(default_factory=dict)
    """The number of each process's last sign of life, and when it was first seen here."""

    def start(self, arguments: Sequence[str], seat: Seat) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        told = {PARENT: str(os.getpid())} | ({PROCESS: str(seat)} if seat.processes > 1 else {})
        quiet = None if seat.rank == 0 else self._log(seat.rank).open("wb")
        member = subprocess.Popen(
            [sys.executable, "-m", "dtrain", *arguments],
            env={"TF_CPP_MIN_LOG_LEVEL": "2"} | environment | told,
            stdout=quiet or subprocess.PIPE,
            stderr=quiet,
            start_new_session=True,
        )
        self.members.append(member)
        if member.stdout:
            self.relays.append(threading.Thread(target=_relay, args=(member.stdout,), daemon=True))
            self.relays[-1].start()

    def watch(self) -> End:
        """Until all are done, or one fails and the rest are taken down."""
        looked = time.monotonic()
        with self._signals():
            while True:
                codes = [member.poll() for member in self.members]
                failed = next((rank for rank, code in enumerate(codes) if code), None)
                if failed is not None:
                    return self._down(failed, codes[failed] or 0)
                if all(code == 0 for code in codes):
                    self._heard()
                    return End(0)
                if time.monotonic() - looked > LOOK:
                    looked, hung = time.monotonic(), self._hung()
                    if hung:
                        return hung
                time.sleep(POLL)

    def _down(self, rank: int, code: int) -> End:
        """The others go after the one that failed first."""
        if code == Stopped.exit_code:
            self._wait(GRACE)  # all agreed to stop; the others are saving too
            return End(code, rank, "asked to stop")
        self.kill()
        if rank:
            _show(rank, self._log(rank).read_text(errors="replace").splitlines()[-TAIL:])
        if code < 0:
            return End(128 - code, rank, f"killed by {signal.Signals(-code).name}")
        return End(code, rank, f"exit code {code}")

    def _hung(self) -> End | None:
        """The process that has shown no sign of life for the longest, where that is too long."""
        now, silent = time.monotonic(), []
        for rank in range(len(self.members)):
            sign = beat.read(self.place.beat(rank)) or beat.Sign()
            number, since = self.signs.get(rank, (-1, now))
            if sign.number != number:
                self.signs[rank] = sign.number, now
            elif now - since > sign.patience:
                silent.append((sign.step, sign.number, rank, sign.section, now - since))
        if not silent:
            return None
        step, _, rank, section, seconds = min(silent)  # those that wait for it got further
        _say(f"process {rank} has been silent for {seconds:.0f} s, in {section} after step {step}; where each is:")
        self._stacks()
        self.kill()
        return End(Hung.exit_code, rank, f"no sign of life for {seconds:.0f} s, in {section} after step {step}")

    def _stacks(self) -> None:
        """Have every process print where its threads are."""
        before = {rank: self._log(rank).stat().st_size for rank in range(1, len(self.members))}
        for member in self.members:
            if member.poll() is None:
                member.send_signal(signal.SIGUSR1)
        time.sleep(1)
        for rank, size in before.items():
            _show(rank, self._log(rank).read_bytes()[size:].decode(errors="replace").splitlines())

    def kill(self) -> None:
        """Nobody is left when this returns."""
        for member in self.members:
            if member.poll() is None:
                member.kill()
        for member in self.members:
            member.wait()

    def _log(self, rank: int) -> Path:
        return self.logs / str(rank)

    def _heard(self) -> None:
        """Until everything that the first process printed was passed on."""
        for thread in self.relays:
            thread.join(timeout=10)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(member.poll() is None for member in self.members):
            time.sleep(POLL)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass a request to stop on to every process; the second one leaves at once."""

        def ask(_number: int, _frame: object) -> None:
            self.asked += 1
            if self.asked > 1:
                self.kill()
                os._exit(Aborted.exit_code)
            for member in self.members:
                member.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __enter__(self) -> "_Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._heard()


def _relay(lines: IO[bytes]) -> None:
    """Pass on what the first process prints, without the lines in which Gloo counts its peers."""
    for line in lines:
        if not line.startswith(b"[Gloo]"):
            sys.stdout.buffer.write(line)
            sys.stdout.flush()


def _show(rank: int, lines: Sequence[str]) -> None:
    for line in lines:
        if "[Gloo]" not in line and "peer ranks" not in line:
            print(f"  ({rank}) {line}", file=sys.stderr)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            raise EnvironmentFault(f"no port is free for the processes to meet: {error.strerror}") from error
        return probe.getsockname()[1]
