"""Send requests to many hosts in parallel, over one connection each; read their replies and logs."""

import os
import queue
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from dtrain.core.errors import DtrainError, EnvironmentFault
from dtrain.launch.wire import HostJob, Reply, Request, Verb, decode, encode

AGAIN = 2.0
"""Seconds before a lost connection is retried."""
WAIT = 30.0
"""Seconds to wait for a reply; ssh itself times out sooner."""


@dataclass(frozen=True)
class Machine:
    """One host of a run, by rank."""

    rank: int
    name: str
    prefix: tuple[str, ...] = ()
    """Command that connects to the host, such as ssh and its options; empty for this machine."""
    python: str = "python3"

    def command(self) -> list[str]:
        """Command line that starts the agent on the host."""
        module = ["-P", "-m", "dtrain.launch.agent"]  # -P: nothing in the working folder is imported
        home = "~/" if self.python.startswith("~/") else ""  # expanded by the remote shell, so it is not quoted
        remote = f"{home}{shlex.join([self.python.removeprefix('~/'), *module])}"
        return [*self.prefix, remote] if self.prefix else [self.python, *module]


@dataclass(frozen=True)
class Answer:
    """The reply of a host; if none arrived, the reply's `problem` is the reason."""

    machine: Machine
    reply: Reply
    asked: float = 0.0
    """Midpoint between request and reply by this machine's clock, in seconds since 1970."""
    uncertainty: float = 0.0
    """Half the time between request and reply, in seconds."""


class Session:
    """A connection to a host's agent, which answers one request at a time.

    ssh runs in its own process group, so that killing the group also ends a ProxyCommand. If this process is killed,
    the agent reads the end of its standard input and exits."""

    def __init__(self, machine: Machine) -> None:
        """Connect. OSError if the program that connects is missing."""
        with ExitStack() as unless_started:
            self._machine, self._stderr = machine, unless_started.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                machine.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True,
                errors="replace", start_new_session=True,
            )  # fmt: skip
            unless_started.pop_all()

    def replies(self, request: Request) -> Iterator[Reply]:
        """The agent's replies; the last one has a problem if the request failed or the connection was lost."""
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.write(encode(request) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            with suppress(ValueError):  # a login banner of the host
                yield decode(line, Reply)
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace")
        if "No module named" in text and "dtrain" in text:
            text = f"dtrain is not installed for {self._machine.python} on that host"
        yield Reply(problem=([line for line in text.splitlines() if line.strip()] or ["the connection was lost"])[-1])

    def kill(self) -> None:
        """Kill the process that connects; may be called from any thread."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Disconnect and close the pipes; called only from the thread that reads."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            with suppress(BrokenPipeError):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]


class Connections:
    """At most `limit` connections at a time, one to each host; reused if there are no more hosts than `limit`."""

    def __init__(self, machines: Sequence[Machine], limit: int, job: HostJob) -> None:
        self.machines, self._limit, self._job = machines, limit, job
        self._sessions: dict[Machine, Session] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()

    def __enter__(self) -> "Connections":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        with self._lock:
            self._closed.set()
            for session in list(self._sessions.values()):
                session.kill()  # ends the threads that still read, after Ctrl-C
        if kind is None or issubclass(kind, Exception):
            self.drop(self.machines)

    def ask(self, verb: Verb, machines: Sequence[Machine] | None = None, **more: Any) -> list[Answer]:
        """Send a request to these machines, or to all, and return their answers in the same order."""
        chosen, pool = self.machines if machines is None else machines, ThreadPoolExecutor(self._limit)
        try:
            return list(pool.map(lambda machine: self._ask(machine, verb, more), chosen))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def follow(self, *, on: bool) -> Iterator[tuple[str, str]]:
        """Yield (host, line) in order of arrival; with `on`, until the run has ended on each host, reconnecting if
        needed. With more hosts than connections, a log starts when that of another host has ended."""
        lines: queue.Queue[tuple[str, str] | None] = queue.Queue()
        free = threading.Semaphore(self._limit)

        def listen(machine: Machine) -> None:
            try:
                with free:
                    for line in self._lines(machine, on):
                        lines.put((machine.name, line))
            finally:
                lines.put(None)

        for machine in self.machines:
            threading.Thread(target=listen, args=[machine], daemon=True).start()
        for _ in self.machines:
            while line := lines.get():
                yield line

    def drop(self, machines: Sequence[Machine]) -> None:
        """Disconnect; the next request opens a new connection."""
        for machine in machines:
            if session := self._sessions.pop(machine, None):
                session.close()

    def _ask(self, machine: Machine, verb: Verb, more: dict[str, object]) -> Answer:
        begin = time.time()
        try:
            session = self._session(machine)
            timer = threading.Timer(WAIT, session.kill)
            timer.start()
            try:
                reply = next(session.replies(self._request(machine, verb, **more)))
            finally:
                timer.cancel()
        except DtrainError as error:
            reply = Reply(problem=error.message)
        end = time.time()
        if reply.problem or len(self.machines) > self._limit:
            self.drop([machine])
        if reply.problem and end - begin >= WAIT:
            reply = Reply(problem=f"no answer in {WAIT:.0f} s")
        return Answer(machine, reply, (begin + end) / 2, (end - begin) / 2)

    def _request(self, machine: Machine, verb: Verb, **more: Any) -> Request:
        return Request(verb=verb, job=replace(self._job, rank=machine.rank), **more)

    def _session(self, machine: Machine) -> Session:
        """The connection to a host, opened if needed. EnvironmentFault if that fails."""
        with self._lock:
            if self._closed.is_set():
                raise EnvironmentFault("interrupted")
            try:
                return self._sessions.get(machine) or self._sessions.setdefault(machine, Session(machine))
            except OSError as error:
                raise EnvironmentFault(f"{error.filename or machine.command()[0]}: {error.strerror}") from error

    def _lines(self, machine: Machine, on: bool) -> Iterator[str]:
        """A host's log to its end, with lines about a lost or restored connection."""
        request, problem = self._request(machine, "logs", follow=on), ""
        while not self._closed.is_set():
            try:
                for reply in self._session(machine).replies(request):
                    if reply.problem:
                        raise EnvironmentFault(reply.problem)
                    if problem:
                        yield "-- reconnected"
                        problem = ""
                    if reply.text is None:
                        if on or reply.code is not None:
                            yield f"-- ended: exit code {'unknown' if reply.code is None else reply.code}"
                        return
                    request = replace(request, offset=reply.offset)
                    yield reply.text
            except DtrainError as error:
                if not problem:
                    yield f"-- not connected: {error.message}"
                problem = error.message
            finally:
                self.drop([machine])
            if not on:
                return
            self._closed.wait(AGAIN)
