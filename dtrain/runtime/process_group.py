"""Local processes that train together: started, monitored and terminated together."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dtrain.core import heartbeat
from dtrain.core.errors import EnvironmentFault, Hung, Stopped
from dtrain.core.process_info import ProcessInfo
from dtrain.core.run_dir import Folder
from dtrain.parallel.rendezvous import LOOPBACK
from dtrain.runtime.standbys import Standbys, process_environment

POLL = 0.02
"""Seconds between polls of the processes."""
LOOK = 0.5
"""Seconds between reads of the heartbeats."""
GRACE = 120.0
"""Seconds that processes have to save after they agreed to stop."""
UNSTARTED = 5.0
"""Seconds that the other processes have to exit if one stopped before its first step: there is nothing to save."""
LOST = {Hung.exit_code, -signal.SIGABRT}
"""Exit codes of a process that lost the connection to another: its own error, and JAX's abort."""
AFTER_LOSS = 5.0
"""Seconds after such an end in which another process may end with the error that caused it."""
TAIL = 12
"""Lines of output that are shown of a process that failed."""
NOISE = re.compile(rb"^\[Gloo\]|peer ranks|preemption_notifier\.cc")
"""Lines to drop: Gloo counts its peers, and JAX logs a signal that the run reports itself."""


@dataclass(frozen=True)
class End:
    """How one start of the run ended: exit code, the process that ended first, and the cause."""

    code: int
    rank: int = 0
    cause: str = ""
    remote: bool = False
    """Whether the run ended on another machine, and must not be restarted."""
    peer: bool = False
    """Whether the cause may be the loss of a process on another host, which this host cannot identify."""
    unstarted: bool = False
    """Whether the process stopped before the rendezvous, so that the other hosts do not notice."""


@dataclass
class ProcessGroup:
    """The processes of this machine, by rank. The output of the first is shown, that of the others goes to logs."""

    logs: Path
    run_dir: Folder
    infos: list[ProcessInfo] = field(default_factory=list)
    members: list[subprocess.Popen[bytes]] = field(default_factory=list)
    relays: list[threading.Thread] = field(default_factory=list)
    standbys: Standbys | None = None
    """Processes that wait to be started."""
    before: dict[int, heartbeat.Heartbeat | None] = field(default_factory=dict)
    """The last heartbeat of each process's predecessor, which is not one of this process."""
    signs: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Number of each process's last heartbeat, and the local time when it was first read."""

    def start(self, arguments: Sequence[str], info: ProcessInfo, more: Mapping[str, str]) -> None:
        """Start one process; `more` are additional environment variables."""
        self.before[info.rank] = heartbeat.read(self.run_dir.heartbeat(info.rank))
        own = {**info.environment(), **more}
        with ExitStack() as stack:
            if self.members:
                out = err = stack.enter_context(self._log(info.rank).open("wb")).fileno()
            else:
                shown, out = os.pipe()
                stack.callback(os.close, out)
                err = 2
                self.relays.append(threading.Thread(target=_relay, args=(os.fdopen(shown, "rb"),), daemon=True))
                self.relays[-1].start()
            member = self.standbys.take(own, out, err) if self.standbys else None
            member = member or subprocess.Popen(
                [sys.executable, "-m", "dtrain", *arguments],
                env=process_environment(info.world_size > 1) | own,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.members.append(member)
        self.infos.append(info)

    @property
    def trains(self) -> bool:
        """Whether the first process has trained a step."""
        latest = heartbeat.read(self.run_dir.heartbeat(self.infos[0].rank))
        return bool(latest and latest != self.before[self.infos[0].rank] and latest.step > latest.first)

    def watch(self, remote: Callable[[], End | None]) -> End:
        """Wait until all processes are done, or one fails and the rest are killed, or `elsewhere` returns an end."""
        looked = time.monotonic()
        while True:
            codes = [member.poll() for member in self.members]
            failed = next((number for number, code in enumerate(codes) if code), None)
            if failed is not None:
                return self._down(*self._cause(failed, codes[failed] or 0))
            if all(code == 0 for code in codes):
                self._drain()
                return End(0)
            if time.monotonic() - looked > LOOK:
                looked, hung = time.monotonic(), self._hung()
                if hung:
                    return hung
                if ended := remote():
                    self.kill()
                    return ended
            time.sleep(POLL)

    def _cause(self, number: int, code: int) -> tuple[int, int]:
        """The process whose end made the others fail, and its exit code.

        One that lost the connection to another may end before that other one, which still prints its error.
        """
        end = time.monotonic() + AFTER_LOSS
        while code in LOST and time.monotonic() < end:
            codes = [member.poll() for member in self.members]
            first = next((other for other, found in enumerate(codes) if found and found not in LOST), None)
            if first is not None:
                return first, codes[first] or 0
            if None not in codes:
                break
            time.sleep(POLL)
        return number, code

    def _down(self, number: int, code: int) -> End:
        """Terminate the other processes after the first one that ended with an error."""
        rank = self.infos[number].rank
        if code == Stopped.exit_code:
            latest = heartbeat.read(self.run_dir.heartbeat(rank))
            started = latest is not None and latest != self.before[rank]
            saves = started and latest is not None and latest.step > 0
            self._wait(GRACE if saves else UNSTARTED)  # all processes agreed to stop, and save as well
            return End(code, rank, "asked to stop", unstarted=not started)
        self.kill()
        if number:
            _show(rank, self._log(rank).read_text(errors="replace").splitlines()[-TAIL:])
        if code < 0:
            cause = f"killed by {signal.Signals(-code).name}"
            return End(128 - code, rank, cause, peer=-code == signal.SIGABRT)  # JAX aborts the remaining processes
        return End(code, rank, f"exit code {code}", peer=code == Hung.exit_code)

    def _hung(self) -> End | None:
        """If processes send no heartbeat, print the stacks, kill the group and return the one that hangs."""
        now, silent = time.monotonic(), []
        for rank in (info.rank for info in self.infos):
            latest = heartbeat.read(self.run_dir.heartbeat(rank))
            latest = heartbeat.Heartbeat() if latest is None or latest == self.before[rank] else latest
            number, since = self.signs.get(rank, (-1, now))
            if latest.number != number:
                self.signs[rank] = latest.number, now
            elif now - since > latest.patience:
                silent.append((latest.step, latest.turn, rank, latest.section, now - since))
        if not silent:
            return None
        step, _, rank, section, seconds = min(silent)  # processes that wait for it got further
        cause = f"no heartbeat for {seconds:.0f} s, in {section} after step {step}"
        say(f"process {rank}: {cause}; stacks of all processes:")
        self._stacks()
        self.kill()
        return End(Hung.exit_code, rank, cause)

    def _stacks(self) -> None:
        """Make every process print the stacks of its threads, and show those that went to logs."""
        before = {info.rank: self._log(info.rank).stat().st_size for info in self.infos[1:]}
        for member in self.members:
            if member.poll() is None:
                member.send_signal(signal.SIGUSR1)
        time.sleep(1)
        for rank, size in before.items():
            _show(rank, self._log(rank).read_bytes()[size:].decode(errors="replace").splitlines())

    def kill(self) -> None:
        """Kill all processes and wait for them."""
        for member in self.members:
            if member.poll() is None:
                member.kill()
        for member in self.members:
            member.wait()

    def _log(self, rank: int) -> Path:
        return self.logs / str(rank)

    def _drain(self) -> None:
        """Wait until all output of the first process is printed."""
        for thread in self.relays:
            thread.join(timeout=10)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(member.poll() is None for member in self.members):
            time.sleep(POLL)

    def ask(self) -> None:
        """Ask every process to save and exit (SIGTERM)."""
        for member in self.members:
            member.send_signal(signal.SIGTERM)

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._drain()


def _relay(lines: IO[bytes]) -> None:
    """Print the output of the first process without the lines that match NOISE."""
    with lines:
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
    """A free port for the rendezvous of the processes, reserved while inside this context."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((LOOPBACK, 0))
        except OSError as error:
            raise EnvironmentFault(f"no port is free for the rendezvous of the processes: {error.strerror}") from error
        yield holder.getsockname()[1]


def say(text: str) -> None:
    """Print a line to the terminal (stderr)."""
    print(text, file=sys.stderr, flush=True)
