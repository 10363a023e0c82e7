"""Machines that ssh reaches without asking for a password; the first one is the coordinator."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import MinLen
from pydantic import StringConstraints

from dtrain.core.errors import EnvironmentFault, FieldError
from dtrain.core.types import Positive, PositiveFloat, Sentence
from dtrain.launch.fanout import Connections, Machine
from dtrain.launch.job import Say
from dtrain.launch.names import Host, RemotePath
from dtrain.launch.targets.hosts import Hosts, names

CONNECT, CONNECT_BY_PROXY = 5, 20
"""Connection timeouts of ssh, in seconds; a proxy command that opens a tunnel takes longer."""
OPTIONS = {"BatchMode": "yes", "ServerAliveInterval": "1", "ServerAliveCountMax": "3", "LogLevel": "ERROR"}
"""Options of ssh: a host that stops answering is detected in three to four seconds."""
POLL, SHOWN = 10.0, 60.0
"""Seconds between two checks for ready files, and between two messages about hosts without one."""

Proxy = Annotated[
    str,
    StringConstraints(pattern=r"^(?:[^%\x00-\x1f\x7f]|%[^h\x00-\x1f\x7f])*%h[^\x00-\x1f\x7f]{0,1000}$"),
    Sentence("a command in one line, with %h for the host, that connects its input and output to sshd there"),
]
"""A ProxyCommand of ssh: a shell command, run on this machine."""


@dataclass(frozen=True, kw_only=True)
class Ssh(Hosts):
    """Machines that ssh reaches without asking for a password; the first one is the coordinator."""

    kind: Literal["ssh"] = "ssh"
    hosts: Annotated[tuple[Host, ...], MinLen(1)]
    """Names or IPv4 addresses for ssh, with user@ if your name there differs; the order determines the ranks."""
    addresses: tuple[Host, ...] = ()
    """Names or addresses by which the hosts reach each other, in the same order; default: `hosts`."""
    proxy: Proxy | None = None
    """For hosts that ssh cannot reach directly, as by IAP: a shell command, run on this machine for each connection."""
    connections: Positive = 32
    """Largest number of connections at a time, one for each host. Reused if there are no more hosts than this."""
    ready: RemotePath | None = None
    """A file on each host that exists when it is set up; `up` waits for it."""
    ready_minutes: PositiveFloat = 20
    """How long `up` waits for the file of `ready`."""
    wheel: str | None = None
    """What the ready file must say: the wheel that the hosts were set up from. Others are refused."""
    identity: str | None = None
    """A private key file, if ssh would not find it."""
    known_hosts: str | None = None
    """A file of host keys, used in place of your own; a host whose key is not in it is refused."""

    def __post_init__(self) -> None:
        if self.wheel and not self.ready:
            raise FieldError("wheel", "without a ready file, no host says which wheel it was set up from", "set ready")
        for field, listed in (("hosts", self.hosts), ("addresses", self.addresses)):
            if twice := {host for host in listed if listed.count(host) > 1}:
                raise FieldError(field, f"{min(twice)} is listed twice")
        if self.addresses and len(self.addresses) != len(self.hosts):
            raise FieldError("addresses", f"{len(self.addresses)} for {len(self.hosts)} hosts: give one for each host")

    def machines(self) -> list[Machine]:
        options = OPTIONS | {"ConnectTimeout": str(CONNECT_BY_PROXY if self.proxy else CONNECT)}
        options |= {"ProxyCommand": self.proxy} if self.proxy else {}
        options |= {"UserKnownHostsFile": str(Path(self.known_hosts).expanduser())} if self.known_hosts else {}
        command = ["ssh", *(word for option in options.items() for word in ("-o", "=".join(option)))]
        command += ["-i", str(Path(self.identity).expanduser())] if self.identity else []
        return [Machine(rank, host, (*command, "--", host), self.python) for rank, host in enumerate(self.hosts)]

    def coordinator(self) -> str:
        first = (self.addresses or self.hosts)[0].rpartition("@")[2]
        return f"{first}:{self.port}" if len(self.hosts) > 1 else ""

    def most_connections(self) -> int:
        return self.connections

    def describe(self) -> list[str]:
        lines = [f"shell command run here for each connection: {self.proxy}"] if self.proxy else []
        lines += [f"private key file: {self.identity}"] if self.identity else []
        lines += [f"host keys, in place of your own: {self.known_hosts}"] if self.known_hosts else []
        lines += [f"coordinator: {self.coordinator()}"] if self.addresses else []
        lines += [f"waits for {self.ready} on each host, at most {self.ready_minutes:g} minutes"] if self.ready else []
        return [*super().describe(), *lines]

    def await_ready(self, link: Connections, say: Say) -> None:
        """Wait for the ready file. A host that is unreachable or lacks dtrain may still be setting itself up.

        EnvironmentFault if a host was set up from another wheel."""
        end, shown, pending = time.monotonic() + 60 * self.ready_minutes, 0.0, link.machines if self.ready else ()
        while pending:
            answers = link.ask("preflight", pending, ready=self.ready)
            late = [one for one in answers if not one.reply.ready]
            why = next((f" ({one.machine.name}: {one.reply.problem})" for one in late if one.reply.problem), "")
            pending = [one.machine for one in late]
            stale = [one for one in answers if one.reply.ready and self.wheel not in (None, one.reply.setup)]
            if stale:
                what = f"was set up from {stale[0].reply.setup or 'an unknown wheel'}, not from {self.wheel}"
                hint = "terraform apply replaces hosts whose wheel has changed"
                raise EnvironmentFault(f"{names([one.machine for one in stale])} {what}", hint)
            text = f"{len(late)} of {len(link.machines)} hosts without {self.ready}: {names(pending)}{why}"
            if late and time.monotonic() > end:
                raise EnvironmentFault(
                    f"after {self.ready_minutes:g} minutes {text}", "see the start-up logs of these hosts"
                )
            if late and time.monotonic() > shown + SHOWN:
                shown = time.monotonic()
                say(f"waiting for {text}")
            link.drop(pending)  # a new agent loads what is installed by then
            time.sleep(POLL if late else 0)
