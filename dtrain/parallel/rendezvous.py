"""Where processes find each other before JAX joins them: JAX ends a process that waits in vain, and names nobody.

The first process listens at the coordinator's address; each other sends its rank there, and gets one of three answers:
to go on, who is missing, or why the run is not to start.
"""

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from dtrain.core.errors import DtrainError, EnvironmentFault, Exhausted, Hung, Stopped, StopRequested
from dtrain.core.process_info import rendezvous_seconds

LOOPBACK = "127.0.0.1"
PATIENCE = 300.0
"""Seconds that processes wait for each other."""
WORD = 5.0
"""Seconds in which one that has connected says its rank."""
AGAIN = 0.1
ASK = 1.0
"""Seconds between questions for a refusal."""
LINGER = 30.0
"""Seconds in which the first process passes on why the run is not to start, where not all are there yet."""
GO, REFUSED, RANKS = "go", "refused ", re.compile(r"\d+(,\d+)*")
KINDS: dict[int, type[DtrainError]] = {0: StopRequested, Exhausted.exit_code: Exhausted}

Refusal = Callable[[], DtrainError | None]
"""Why the run is not to start, as far as the first process knows by now."""


class Missing(Hung):
    """Processes did not come to the rendezvous in time; `ranks` are theirs."""

    def __init__(self, ranks: set[int], processes: int, address: str, seconds: float) -> None:
        self.ranks = sorted(ranks)
        who = f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, self.ranks))} of {processes}"
        hint = "see what they say, and whether their machines reach that address"
        super().__init__(f"{who} did not come to {address} in {seconds:.0f} s", hint)


def meet(rank: int, processes: int, address: str, refusal: Refusal = lambda: None) -> None:
    """Wait until all are there. Missing names those that are not, EnvironmentFault what holds the address.

    Where the first process has a `refusal`, before or while it waits, it is raised in every process; another one's
    own counts where the first does not answer.
    """
    host, _, port = address.rpartition(":")
    seconds = rendezvous_seconds(PATIENCE)
    where, end = (host.strip("[]"), int(port)), time.monotonic() + seconds
    missing = _receive(processes, where, end, refusal) if rank == 0 else _report(rank, where, end, refusal)
    if missing:
        raise Missing(missing, processes, address, seconds)


def _receive(processes: int, where: tuple[str, int], end: float, refusal: Refusal) -> set[int]:
    """The ranks that did not come; those that did get the answer. Raises what `refusal` gives."""
    missing, refused = set(range(1, processes)), None
    with ExitStack() as stack:
        listener = stack.enter_context(_listening(where))
        guests: list[socket.socket] = []
        while missing and (left := end - time.monotonic()) > 0:
            if refused is None and (refused := refusal()):
                end = min(end, time.monotonic() + LINGER)
                _answer(guests, refused, missing)
            listener.settimeout(min(left, ASK))
            with suppress(OSError, ValueError):  # nobody, or somebody else
                guest = stack.enter_context(listener.accept()[0])
                guest.settimeout(WORD)
                missing.discard(int(_line(guest)))
                guests.append(guest)
                if refused:
                    _answer(guests, refused, missing)
        refused = refused or refusal()
        _answer(guests, refused, missing)
    if refused:
        raise refused
    return missing


def _answer(guests: list[socket.socket], refused: DtrainError | None, missing: set[int]) -> None:
    """Answer those that wait, each once."""
    text = ",".join(map(str, missing)) or GO
    if refused:
        text = REFUSED + json.dumps([refused.exit_code, refused.message, refused.hint])
    for guest in guests:
        with suppress(OSError):  # it left meanwhile: JAX will find out
            guest.sendall(f"{text}\n".encode())
    guests.clear()


def _report(rank: int, where: tuple[str, int], end: float, refusal: Refusal) -> set[int]:
    """The ranks that did not come, as the first process says; 0 where it says nothing. Raises its refusal, or what
    this process knows by itself where the first one is not there: it may have left for the same reason."""
    patient = time.monotonic() + LINGER
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(where, WORD) as host:
            host.sendall(f"{rank}\n".encode())
            host.settimeout(end - time.monotonic() + WORD)
            options = _line(host)
            if options == GO:
                return set()
            if options.startswith(REFUSED):
                code, message, hint = json.loads(options.removeprefix(REFUSED))
                raise KINDS.get(code, Stopped)(message, hint)
            if RANKS.fullmatch(options):  # else another program answers there
                return {int(one) for one in options.split(",")}
        if time.monotonic() > patient and (refused := refusal()):
            raise refused
        time.sleep(AGAIN)
    return {0}


@contextmanager
def _listening(where: tuple[str, int]) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    beside = where[0] == LOOPBACK  # the parent's own socket, which keeps the port from others
    here = LOOPBACK if beside else ""  # a name or an outer address may be none of this machine's own
    with socket.socket(family) as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if beside else socket.SO_REUSEADDR, 1)
            listener.bind((here, where[1]))
            listener.listen()
        except OSError as error:
            hint = "another program may hold it: choose another port"
            raise EnvironmentFault(f"cannot listen on port {where[1]}: {error.strerror}", hint) from error
        yield listener


def _line(guest: socket.socket) -> str:
    """Up to a line feed; empty where the other side left."""
    text = b""
    while not text.endswith(b"\n") and len(text) < 10_000:
        part = guest.recv(1024)
        if not part:
            return ""
        text += part
    return text.decode(errors="replace").strip()
