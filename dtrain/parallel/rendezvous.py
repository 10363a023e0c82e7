"""Rendezvous of the processes of a run, before `jax.distributed.initialize`: JAX would abort a process that waits too
long, without the ranks that are missing.

Rank 0 listens at the coordinator's address. Every other process connects, sends its rank and receives one of three
answers: start, the ranks that are missing, or the error for which the run must not start.
"""

import ipaddress
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
"""Default seconds that processes wait for each other."""
RANK_TIMEOUT = 5.0
"""Seconds in which a connected process must send its rank."""
RETRY_INTERVAL = 0.1
"""Seconds between attempts to connect to rank 0."""
REFUSAL_INTERVAL = 1.0
"""Seconds between calls of `refusal` while rank 0 waits."""
LINGER = 30.0
"""Seconds for which rank 0, after a refusal, still waits for late processes to send it to them."""
CLOSED, CONNECTED = 0.02, 1.0
"""Seconds in which rank 0 closes its own listener, and for which others look for the coordinator's."""
GO, REFUSED, RANKS = "go", "refused ", re.compile(r"\d+(,\d+)*")
KINDS: dict[int, type[DtrainError]] = {0: StopRequested, Exhausted.exit_code: Exhausted}

Refusal = Callable[[], DtrainError | None]
"""Return the error for which the run must not start, or None so far."""


class Missing(Hung):
    """The processes `ranks` did not arrive at the rendezvous in time."""

    def __init__(self, ranks: set[int], processes: int, address: str, seconds: float) -> None:
        self.ranks = sorted(ranks)
        who = f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, self.ranks))} of {processes}"
        hint = "read their logs, and check that their hosts can connect to that address"
        super().__init__(f"{who} did not arrive at the rendezvous {address} within {seconds:.0f} s", hint)


def wait_for_all(rank: int, processes: int, address: str, refusal: Refusal = lambda: None) -> None:
    """Wait until all processes have arrived.

    Raises Missing with the ranks that have not, or EnvironmentFault if rank 0 cannot listen at the address. A `refusal`
    of rank 0, before or while it waits, is raised in every process. The `refusal` of another process is used only if
    rank 0 does not answer.
    """
    host, _, port = address.rpartition(":")
    seconds = rendezvous_seconds(PATIENCE)
    where, end = (host.strip("[]"), int(port)), time.monotonic() + seconds
    missing = _receive(processes, where, end, refusal) if rank == 0 else _report(rank, where, end, refusal)
    if missing:
        raise Missing(missing, processes, address, seconds)


def _receive(processes: int, where: tuple[str, int], end: float, refusal: Refusal) -> set[int]:
    """Rank 0: collect the ranks, answer them, and return those that are missing. Raises what `refusal` returns."""
    missing, refused = set(range(1, processes)), None
    with ExitStack() as stack:
        listener = stack.enter_context(_listening(where))
        clients: list[socket.socket] = []
        while missing and (remaining := end - time.monotonic()) > 0:
            if refused is None and (refused := refusal()):
                end = min(end, time.monotonic() + LINGER)
                _answer(clients, refused, missing)
            listener.settimeout(min(remaining, REFUSAL_INTERVAL))
            with suppress(OSError, ValueError):  # no connection yet, or one from another program
                client = stack.enter_context(listener.accept()[0])
                client.settimeout(RANK_TIMEOUT)
                missing.discard(int(_line(client)))
                clients.append(client)
                if refused:
                    _answer(clients, refused, missing)
        refused = refused or refusal()
        _answer(clients, refused, missing)
    if refused:
        raise refused
    return missing


def _answer(clients: list[socket.socket], refused: DtrainError | None, missing: set[int]) -> None:
    """Send the answer to the waiting processes and forget them, so that each gets one answer."""
    text = ",".join(map(str, missing)) or GO
    if refused:
        text = REFUSED + json.dumps([refused.exit_code, refused.message, refused.hint])
    for client in clients:
        with suppress(OSError):  # it has disconnected: jax.distributed will notice
            client.sendall(f"{text}\n".encode())
    clients.clear()


def _report(rank: int, where: tuple[str, int], end: float, refusal: Refusal) -> set[int]:
    """Other ranks: report to rank 0 and return the missing ranks from its answer, or {0} if it does not answer.

    Raises the refusal of rank 0. If rank 0 cannot be reached for LINGER seconds, it may have exited for a reason that
    this process finds, too: then raises its own `refusal`.
    """
    own_refusal_from = time.monotonic() + LINGER
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(where, RANK_TIMEOUT) as host:
            host.sendall(f"{rank}\n".encode())
            host.settimeout(end - time.monotonic() + RANK_TIMEOUT)
            answer = _line(host)
            if answer == GO:
                return set()
            if answer.startswith(REFUSED):
                code, message, hint = json.loads(answer.removeprefix(REFUSED))
                raise KINDS.get(code, Stopped)(message, hint)
            if RANKS.fullmatch(answer):  # else another program listens there
                return {int(missing) for missing in answer.split(",")}
        if time.monotonic() > own_refusal_from and (refused := refusal()):
            raise refused
        time.sleep(RETRY_INTERVAL)
    return {0}


def await_listener(where: tuple[str, int]) -> None:
    """Wait until JAX's coordinator listens there, or a second: if a client of it comes before, it tries again only
    after a second."""
    end = time.monotonic() + CONNECTED
    time.sleep(CLOSED)
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(where, CONNECTED):
            return
        time.sleep(CLOSED)


def interface(host: str) -> str:
    """The address to listen on, so that others reach this machine as `host`; empty for all interfaces.

    It is the one address that the name stands for, if this machine has it. A name may stand for the loopback address
    here and for another one elsewhere, and an external address may be translated on the way: then all are used.
    """
    try:
        found = {one[4][0] for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        (address,) = found
        with socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):
        return ""
    own = ipaddress.ip_address(address)
    return "" if own.is_loopback and host not in (LOOPBACK, "::1", "localhost") else str(address)


@contextmanager
def _listening(where: tuple[str, int]) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    shared = where[0] == LOOPBACK  # the supervisor's own socket reserves the port, so it must be shared with that one
    with socket.socket(family) as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
            listener.bind((interface(where[0]), where[1]))
            listener.listen()
        except OSError as error:
            hint = "if another program uses it, choose another port"
            raise EnvironmentFault(f"cannot listen on port {where[1]}: {error.strerror}", hint) from error
        yield listener


def _line(connection: socket.socket) -> str:
    """One line, without its end; empty if the other side disconnects before it."""
    text = b""
    while not text.endswith(b"\n") and len(text) < 10_000:
        part = connection.recv(1024)
        if not part:
            return ""
        text += part
    return text.decode(errors="replace").strip()
