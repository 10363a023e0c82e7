"""Where processes find each other before JAX joins them: JAX ends a process that waits in vain, and names nobody.

The first process listens at the coordinator's address; each other says its rank there, and is told either to go on
or who is missing.
"""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from dtrain.errors import EnvironmentFault, Hung

LOOPBACK = "127.0.0.1"
PATIENCE = 300.0
"""Seconds that processes wait for each other."""
WORD = 5.0
"""Seconds in which one that has connected says its rank."""
AGAIN = 0.1
GO, RANKS = "go", re.compile(r"\d+(,\d+)*")


def meet(rank: int, processes: int, address: str) -> None:
    """Wait until all are there. Hung names those that are not, EnvironmentFault what holds the address."""
    host, _, port = address.rpartition(":")
    where, end = (host.strip("[]"), int(port)), time.monotonic() + PATIENCE
    missing = _receive(processes, where, end) if rank == 0 else _report(rank, where, end)
    if missing:
        who = f"process{'es' * (len(missing) > 1)} {', '.join(map(str, sorted(missing)))} of {processes}"
        hint = "see what they say, and whether their machines reach that address"
        raise Hung(f"{who} did not come to {address} in {PATIENCE:.0f} s", hint)


def _receive(processes: int, where: tuple[str, int], end: float) -> set[int]:
    """The ranks that did not come; those that did are told."""
    missing = set(range(1, processes))
    with ExitStack() as stack:
        listener = stack.enter_context(_listening(where))
        guests = []
        while missing and (left := end - time.monotonic()) > 0:
            listener.settimeout(left)
            with suppress(OSError, ValueError):  # nobody, or somebody else
                guest = stack.enter_context(listener.accept()[0])
                guest.settimeout(WORD)
                missing.discard(int(_line(guest)))
                guests.append(guest)
        said = ",".join(map(str, missing)) or GO
        for guest in guests:
            with suppress(OSError):  # it left meanwhile: JAX will find out
                guest.sendall(f"{said}\n".encode())
    return missing


def _report(rank: int, where: tuple[str, int], end: float) -> set[int]:
    """The ranks that did not come, as the first process says; 0 where it says nothing."""
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(where, WORD) as host:
            host.sendall(f"{rank}\n".encode())
            host.settimeout(end - time.monotonic() + WORD)
            said = _line(host)
            if said == GO:
                return set()
            if RANKS.fullmatch(said):  # else another program answers there
                return {int(one) for one in said.split(",")}
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
