"""Local processes that train together: started, watched, and taken down together."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dtrain.core import heartbeat
from dtrain.core.errors import EnvironmentFault, Hung, Stopped
from dtrain.core.parent import PARENT
from dtrain.core.process_info import ProcessInfo
from dtrain.core.run_dir import Folder
from dtrain.parallel.rendezvous import LOOPBACK

POLL = 0.02
LOOK = 0.5
"""Seconds between looks at the signs of life."""
GRACE = 120.0
"""Seconds that processes which agreed to stop are given to save."""
UNSTARTED = 5.0
"""Seconds that the others are given where one stopped before its first step: there is nothing to save."""
TAIL = 12
NOISE = re.compile(rb"^\[Gloo\]|peer ranks|preemption_notifier\.cc")
"""Lines in which Gloo counts its peers, and JAX notes a signal that the run answers by itself."""


@dataclass(frozen=True)
class End:
    """How one start of the run ended: the exit code, which process was first, and why."""

    code: int
    rank: int = 0
    cause: str = ""
    elsewhere: bool = False
    """On another machine, for good."""
    peer: bool = False
    """Perhaps because a process on another host is gone: that one is not known here."""
    unstarted: bool = False
    """Stopped before it had met the others, which cannot know."""


@dataclass
class ProcessGroup:
    """The processes of this machine, in the order of their ranks. The first speaks."""

    logs: Path
    place: Folder
    infos: list[ProcessInfo] = field(default_factory=list)
    members: list[subprocess.Popen[bytes]] = field(default_factory=list)
    relays: list[threading.Thread] = field(default_factory=list)
    before: dict[int, heartbeat.Heartbeat | None] = field(default_factory=dict)
    """What each process's predecessor said last: no sign of life of this one."""
    signs: dict[int, tuple[int, float]] = field(default_factory=dict)
    """The number of each process's last sign of life, and when it was first seen here."""

    def start(self, arguments: Sequence[str], info: ProcessInfo, more: Mapping[str, str]) -> None:
        """Start one process with these variables besides its own."""
        self.before[info.rank] = heartbeat.read(self.place.heartbeat(info.rank))
        together = info.world_size > 1  # and talk to each other directly: JAX would ask a proxy
        environment = {k: v for k, v in os.environ.items() if not (together and k.lower().endswith("_proxy"))}
        own = {PARENT: str(os.getpid())} | info.environment()
        quiet = self._log(info.rank).open("wb") if self.members else None
        member = subprocess.Popen(
            [sys.executable, "-m", "dtrain", *arguments],
            env={"TF_CPP_MIN_LOG_LEVEL": "2"} | environment | own | dict(more),
            stdout=quiet or subprocess.PIPE,
            stderr=quiet,
            start_new_session=True,
        )
        self.members.append(member)
        self.infos.append(info)
        if member.stdout:
            self.relays.append(threading.Thread(target=_relay, args=(member.stdout,), daemon=True))
            self.relays[-1].start()

    def watch(self, elsewhere: Callable[[], End | None]) -> End:
        """Until all are done, or one fails and the rest are taken down; or the run has ended on another machine."""
        looked = time.monotonic()
        while True:
            codes = [member.poll() for member in self.members]
            failed = next((number for number, code in enumerate(codes) if code), None)
            if failed is not None:
                return self._down(failed, codes[failed] or 0)
            if all(code == 0 for code in codes):
                self._heard()
                return End(0)
            if time.monotonic() - looked > LOOK:
                looked, hung = time.monotonic(), self._hung()
                if hung:
                    return hung
                if ended := elsewhere():
                    self.kill()
                    return ended
            time.sleep(POLL)

    def _down(self, number: int, code: int) -> End:
        """The others go after the one that failed first."""
        rank = self.infos[number].rank
        if code == Stopped.exit_code:
            latest = heartbeat.read(self.place.heartbeat(rank))
            begun = latest is not None and latest != self.before[rank]
            saves = begun and latest is not None and latest.step > 0
            self._wait(GRACE if saves else UNSTARTED)  # all agreed to stop; the others are saving too
            return End(code, rank, "asked to stop", unstarted=not begun)
        self.kill()
        if number:
            _show(rank, self._log(rank).read_text(errors="replace").splitlines()[-TAIL:])
        if code < 0:
            cause = f"killed by {signal.Signals(-code).name}"
            return End(128 - code, rank, cause, peer=-code == signal.SIGABRT)  # how JAX ends those that are left
        return End(code, rank, f"exit code {code}", peer=code == Hung.exit_code)

    def _hung(self) -> End | None:
        """The process that has shown no sign of life for the longest, where that is too long."""
        now, silent = time.monotonic(), []
        for rank in (info.rank for info in self.infos):
            latest = heartbeat.read(self.place.heartbeat(rank))
            latest = heartbeat.Heartbeat() if latest is None or latest == self.before[rank] else latest
            number, since = self.signs.get(rank, (-1, now))
            if latest.number != number:
                self.signs[rank] = latest.number, now
            elif now - since > latest.patience:
                silent.append((latest.step, latest.turn, rank, latest.section, now - since))
        if not silent:
            return None
        step, _, rank, section, seconds = min(silent)  # those that wait for it got further
        say(f"process {rank} has been silent for {seconds:.0f} s, in {section} after step {step}; where each is:")
        self._stacks()
        self.kill()
        return End(Hung.exit_code, rank, f"no sign of life for {seconds:.0f} s, in {section} after step {step}")

    def _stacks(self) -> None:
        """Have every process print where its threads are."""
        before = {info.rank: self._log(info.rank).stat().st_size for info in self.infos[1:]}
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

    def ask(self) -> None:
        """Ask every process to save and leave."""
        for member in self.members:
            member.send_signal(signal.SIGTERM)

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._heard()


def _relay(lines: IO[bytes]) -> None:
    """Pass on what the first process prints, without what says nothing to anybody."""
    for line in lines:
        if not NOISE.search(line):
            sys.stdout.buffer.write(line)
            sys.stdout.flush()


def _show(rank: int, lines: Sequence[str]) -> None:
    for line in lines:
        if not NOISE.search(line.encode()):
            print(f"  ({rank}) {line}", file=sys.stderr)


@contextmanager
def port() -> Iterator[int]:
    """A port on which the processes meet; nobody else can take it meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((LOOPBACK, 0))
        except OSError as error:
            raise EnvironmentFault(f"no port is free for the processes to meet: {error.strerror}") from error
        yield holder.getsockname()[1]


def say(text: str) -> None:
    """To the terminal, beside what the first process says."""
    print(text, file=sys.stderr, flush=True)
