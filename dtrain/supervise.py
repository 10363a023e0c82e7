"""Several local processes that train together: start them, watch them, take them down together."""

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

from dtrain.errors import Aborted, Stopped
from dtrain.parallel.devices import PROCESS, Seat

POLL = 0.02
GRACE = 10.0
TAIL = 12


def together(arguments: Sequence[str], processes: int) -> int:
    """Run `dtrain` with these arguments in that many processes; the exit code of the first to fail, else 0.

    The first process speaks; what the others say is shown only where one of them dies first.
    """
    with tempfile.TemporaryDirectory(prefix="dtrain-") as logs, _Crew(Path(logs)) as crew:
        address = f"127.0.0.1:{_free_port()}"
        for rank in range(processes):
            crew.start(arguments, Seat(rank, processes, address))
        return crew.watch()


@dataclass
class _Crew:
    """The processes, by rank."""

    logs: Path
    members: list[subprocess.Popen[bytes]] = field(default_factory=list)
    relays: list[threading.Thread] = field(default_factory=list)
    asked: int = 0

    def start(self, arguments: Sequence[str], seat: Seat) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        quiet = None if seat.rank == 0 else (self.logs / str(seat.rank)).open("wb")
        member = subprocess.Popen(
            [sys.executable, "-m", "dtrain", *arguments],
            env={"TF_CPP_MIN_LOG_LEVEL": "2"} | environment | {PROCESS: str(seat)},
            stdout=quiet or subprocess.PIPE,
            stderr=quiet,
            start_new_session=True,
        )
        self.members.append(member)
        if member.stdout:
            self.relays.append(threading.Thread(target=_relay, args=(member.stdout,), daemon=True))
            self.relays[-1].start()

    def watch(self) -> int:
        """Until all are done, or one fails and the rest are taken down."""
        with self._signals():
            while True:
                codes = [member.poll() for member in self.members]
                failed = next((rank for rank, code in enumerate(codes) if code), None)
                if failed is not None:
                    return self._down(failed, codes[failed] or 0)
                if all(code == 0 for code in codes):
                    self._heard()
                    return 0
                time.sleep(POLL)

    def _down(self, rank: int, code: int) -> int:
        """Take the others down after the one that failed first, and say which that was."""
        if code == Stopped.exit_code:
            self._wait(GRACE)  # all agreed to stop; the others are saving too
        else:
            cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            print(f"process {rank} ended first, with {cause}", file=sys.stderr)
            if rank:
                said = (self.logs / str(rank)).read_text(errors="replace").splitlines()[-TAIL:]
                print("\n".join(f"  ({rank}) {line}" for line in said), file=sys.stderr)
        return code if code > 0 else 128 - code

    def _heard(self) -> None:
        """Until everything that the first process printed was passed on."""
        for thread in self.relays:
            thread.join(timeout=GRACE)

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
                self.__exit__()
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
        for member in self.members:
            if member.poll() is None:
                member.kill()
            member.wait()


def _relay(lines: IO[bytes]) -> None:
    """Pass on what the first process prints, without the lines in which Gloo counts its peers."""
    for line in lines:
        if not line.startswith(b"[Gloo]"):
            sys.stdout.buffer.write(line)
            sys.stdout.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
