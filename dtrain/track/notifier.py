"""Send notifications when a run ends, resumes, or has used a set fraction of its time limit.

Each event is sent by one process. Process 0 sends `resumed` and `budget`. The end of the run is sent by the process
whose exit code the caller gets: the supervisor on the first host if there is one, else process 0.
"""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.parse import urlsplit

from dtrain import __version__
from dtrain.core.errors import (
    Aborted,
    DtrainError,
    EnvironmentFault,
    Exhausted,
    Hung,
    Locked,
    Stopped,
    cause,
    user_error,
)
from dtrain.core.files import overwrite, read_json
from dtrain.core.parent import is_supervised
from dtrain.core.process_info import LAUNCH, launch_id
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject
from dtrain.track.notify import Event, Notify

LIMIT = 10.0
"""Maximum seconds that a run waits for the delivery of a notification."""
TIMEOUT = 4.0
"""Timeout of one request in seconds."""
PAUSES = (0.0, 0.5, 1.0)
"""Seconds before each attempt of a request."""
COMMAND = 8.0
"""Timeout of a command in seconds, after which it is killed."""
LONGEST = 500
"""Maximum length of a reason in characters: Slack and Discord reject long texts."""
PASSED = LAUNCH
"""The only DTRAIN_ variable that a command inherits; the others would make a run that it starts part of this run."""


@dataclass(frozen=True, kw_only=True)
class Notification:
    """One event of a run, with the values that the receiver gets."""

    event: str
    run: str
    """Name of the run."""
    state: str
    step: int
    """The newest saved step; 0 if nothing is saved."""
    steps: int | None = None
    reason: str = ""
    exit_code: int | None = None
    share: float | None = None
    """The used fraction of the time limit, for `budget`."""
    host: str = field(default_factory=socket.gethostname)
    launch: str | None = field(default_factory=lambda: os.environ.get(PASSED))
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""

    @property
    def text(self) -> str:
        """The event in one line."""
        saved = (
            f"step {self.step}{f' of {self.steps}' if self.steps else ''} is saved" if self.step else "nothing saved"
        )
        code = f" (exit code {self.exit_code})" if self.exit_code else ""
        line = {
            "finished": f"finished: {self.step} steps",
            "failed": f"failed{code}: {self.reason}; {saved}",
            "preempted": f"was preempted and can resume{code}: {self.reason}",
            "stopped": f"was stopped: {self.reason}",
            "resumed": f"resumed from step {self.step}{f' of {self.steps}' if self.steps else ''}",
            "budget": f"has used {self.share or 0:.0%} of {self.reason}",
        }[self.event]
        return f"{self.run} {line}"

    def json(self) -> bytes:
        """The event as a JSON object on one line; Slack displays `text`, Discord the equal `content`."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return (json.dumps({"text": self.text, "content": self.text} | values) + "\n").encode()

    def environment(self) -> dict[str, str]:
        """The environment variables for a command; a value that is not known is empty."""
        code = "" if self.exit_code is None else str(self.exit_code)
        values = {"EVENT": self.event, "RUN": self.run, "STATE": self.state, "STEP": str(self.step)}
        return {
            f"DTRAIN_{name}": value for name, value in (values | {"REASON": self.reason, "EXIT_CODE": code}).items()
        }


class Channel(Protocol):
    """A destination of notifications."""

    @property
    def name(self) -> str:
        """Its description in warnings."""
        ...

    def deliver(self, notification: Notification) -> str:
        """Deliver a notification within about LIMIT seconds; returns the reason of a failure, empty on success."""
        ...


@dataclass(frozen=True)
class Webhook:
    """An HTTP endpoint, identified in messages by the name of the environment variable that contains its URL."""

    variable: str
    url: str = field(repr=False)

    @property
    def name(self) -> str:
        return f"the webhook in {self.variable}"

    def deliver(self, notification: Notification) -> str:
        """POST the event, with up to two retries if the endpoint does not respond or responds with 429 or 5xx."""
        headers = {"Content-Type": "application/json", "User-Agent": f"dtrain/{__version__}"}
        request = urllib.request.Request(self.url, notification.json(), headers, method="POST")
        end, problem = time.monotonic() + LIMIT - 1, ""
        for pause in PAUSES:
            time.sleep(pause)
            left = end - time.monotonic()
            if left <= 0:
                break
            problem, final = _post(request, min(TIMEOUT, left))
            if final:
                break
        return problem


@dataclass(frozen=True)
class Command:
    """A program on this machine; its output is discarded."""

    words: Sequence[str]

    @property
    def name(self) -> str:
        return f"the command {self.words[0]}"

    def deliver(self, notification: Notification) -> str:
        inherited = {k: v for k, v in os.environ.items() if k == PASSED or not k.startswith("DTRAIN_")}
        try:
            running = subprocess.Popen(
                self.words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=inherited | notification.environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return cause(error)
        try:
            running.communicate(notification.json(), timeout=COMMAND)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            return f"it took longer than {COMMAND:.0f} s and was killed"
        return f"it exited with code {running.returncode}" if running.returncode else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as a failure, because a redirected POST would become a GET without the body."""

    def redirect_request(
        self, req: object, fp: object, code: object, msg: object, headers: object, newurl: object
    ) -> None:
        return None


def _post(request: urllib.request.Request, seconds: float) -> tuple[str, bool]:
    """Send a request; returns the error text, empty on success, and whether a retry would be pointless."""
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=seconds):
            return "", True
    except HTTPError as error:
        error.close()
        return f"HTTP status {error.code}", error.code < 500 and error.code != 429
    except (OSError, HTTPException) as error:  # URLError is an OSError
        return _without_url(error), False


def _without_url(error: Exception) -> str:
    """The cause of a failed request; some error texts contain the URL, so only texts known to be safe are returned."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return "no response before the timeout"
    if isinstance(reason, OSError) and not isinstance(reason, ssl.SSLError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__


ORDER = 2.0
"""Maximum seconds that a notification waits for earlier ones, so that they arrive in order."""
KILLED = 128
"""An exit code above this means that signal number (exit code - 128) ended the process."""

Close = Callable[[str, str, int], int]
"""(state, reason, exit code) → exit code: called before a process ends at once, for example on a second signal."""


def channels_of(settings: Notify) -> list[Channel]:
    """The destinations; EnvironmentFault if the command or the environment variable does not exist."""
    channels: list[Channel] = []
    if settings.webhook is not None:
        channels.append(Webhook(settings.webhook, _url(settings.webhook)))
    if settings.command:
        if not shutil.which(settings.command[0]):
            as_list = "write the program and its arguments as a list"
            hint = as_list if " " in settings.command[0] else "install it, or give its full path"
            raise EnvironmentFault(f"track.notify.command: no program {settings.command[0]!r} on this machine", hint)
        channels.append(Command(settings.command))
    return channels


def _url(variable: str) -> str:
    """The URL in the variable; EnvironmentFault if it is not an HTTP URL. The message does not show the value."""
    url = os.environ.get(variable, "").strip()
    if not url:
        message = f"track.notify.webhook: the environment variable {variable} is not set"
        raise EnvironmentFault(message, f"export {variable}=..., or disable notifications: track.notify=null")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
        usable = usable and parts.port != 0 and url.isascii() and url.isprintable() and " " not in url
    except ValueError:
        usable = False
    if not usable:
        message = f"track.notify.webhook: the environment variable {variable} is not a valid http:// or https:// URL"
        raise EnvironmentFault(message, "correct its value, which is a secret and not shown here")
    return url


@dataclass
class Notifier:
    """Sends the events of one run from this process, each in its own thread, so that training does not wait."""

    settings: Notify | None
    """None if this process sends nothing."""
    run_dir: Folder
    """The run folder."""
    warn: Callable[[str], object]
    wait: float
    """Maximum seconds that the process waits at its end for deliveries in progress."""
    _channels: list[Channel] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _ending: Any = field(default_factory=threading.Lock)
    """Acquired by the thread that sends the end, and never released: the end is sent only once."""
    _once: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._channels = channels_of(self.settings) if self.settings else []

    def resumed(self, step: int, steps: int) -> None:
        """Send `resumed` if this start resumes from a saved step; only the first call counts, as later ones are
        rollbacks."""
        if step and "resumed" not in self._once:
            self._send("resumed", "running", {"step": step, "steps": steps}, reason=f"resumed from step {step}")
        self._once.add("resumed")

    def spent(self, share: float, limit: str = "its time limit") -> None:
        """Report the used share of a limit; called regularly in process 0.

        `budget` is sent at the first report of at least `track.notify.share`, once for all starts of a launch.
        """
        if not self.settings or "budget" in self._once or "budget" not in self.settings.on:
            return
        path, launch = self.run_dir.path / "notified.json", launch_id()
        if share < self.settings.share:
            if "below" not in self._once:
                with suppress(OSError):
                    path.unlink(missing_ok=True)  # from an earlier launch, or from a shorter limit
            self._once.add("below")
            return
        self._once.add("budget")
        with suppress(OSError, ValueError):
            if read_json(path) == {"budget": launch}:
                return
        with suppress(OSError):
            overwrite(path, json.dumps({"budget": launch}))
        self._send("budget", "running", self._record(), reason=limit, share=round(share, 4))

    def closing(self, close: Close) -> Close:
        """Wrap `close` so that the end of the run is sent after it. After a second stop signal nothing is sent."""

        def closed(state: str, reason: str, code: int) -> int:
            code = close(state, reason, code)
            if self.settings and not is_supervised() and state != "aborted" and self._ending.acquire(blocking=False):
                self._end(code, reason)
            return code

        return closed

    def ended(self, code: int, reason: str) -> None:
        """Send how the run ended, and wait until that is delivered or has failed."""
        # the lock may be held by the thread of a signal, which ends the process after it has sent the event
        if self.settings and self._ending.acquire(timeout=self.wait + 1):
            self._end(code, reason)

    def join(self) -> None:
        """Wait for deliveries in progress, at most `wait` seconds, and warn about those that are not finished."""
        end, (threads, self._threads) = time.monotonic() + self.wait, (self._threads, [])
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self._warn(f"a notification was not delivered within {self.wait:.0f} s")

    def _end(self, code: int, reason: str) -> None:
        record = self._record()
        event = _event_of(code, record.get("state", ""))
        if event:
            recorded = record.get("reason", "") if record.get("exit_code") == code else ""
            state = {"preempted": "stopped"}.get(event, event)
            self._send(event, state, record, reason=reason or recorded or _cause_of(code), exit_code=code)
            self.join()

    @property
    def starts(self) -> int:
        """Number of starts of the run so far, from run.json."""
        return self._record().get("starts", 0)

    def _record(self) -> JsonObject:
        with suppress(DtrainError, OSError):
            return self.run_dir.read_record()
        return {}

    def _send(self, event: Event, state: str, record: JsonObject, **values: Any) -> None:
        if not self.settings or event not in self.settings.on:
            return
        values["reason"] = " ".join(values["reason"].split())[:LONGEST]
        step, steps = record.get("step", 0), record.get("steps")
        notification = Notification(
            event=event, run=self.run_dir.path.name, state=state, step=step, steps=steps, **values
        )  # fmt: skip
        before = tuple(self._threads)
        for channel in self._channels:
            work = (channel, notification, before)
            self._threads.append(threading.Thread(target=self._deliver, args=work, name="notify", daemon=True))
            self._threads[-1].start()

    def _deliver(self, channel: Channel, notification: Notification, before: tuple[threading.Thread, ...]) -> None:
        end = time.monotonic() + ORDER
        for thread in before:
            thread.join(max(0.0, end - time.monotonic()))
        try:
            problem = channel.deliver(notification)
        except Exception as error:  # show only the class: the text may contain the URL
            problem = type(error).__name__
        if problem:
            self._warn(f"`{notification.event}` was not delivered to {channel.name}: {problem}")

    def _warn(self, text: str) -> None:
        with suppress(DtrainError, OSError):
            self.warn(text)


def _event_of(code: int, state: str) -> Event | None:
    """The event for an end with this exit code; None if the run was aborted or another process uses its folder."""
    if code in (Aborted.exit_code, Locked.exit_code):
        return None
    if code == Stopped.exit_code:
        return "preempted"
    return "failed" if code else "stopped" if state == "stopped" else "finished"


@contextmanager
def notifying(
    settings: Notify | None, run_dir: Folder, warn: Callable[[str], object], patience: float
) -> Iterator[Notifier]:
    """A notifier for a training process; at the end of the context it sends how the run ended.

    `patience`: seconds after which the supervisor considers this process as hanging. EnvironmentFault if the settings
    do not allow to send anything.
    """
    notifier = Notifier(settings, run_dir, warn, min(LIMIT, patience / 2) if is_supervised() else LIMIT)
    try:
        yield notifier
    except BaseException as error:
        if not is_supervised():
            notifier.ended(*_code_and_reason(error))
        notifier.join()
        raise
    if not is_supervised():
        notifier.ended(0, "")
    notifier.join()


@contextmanager
def supervising(
    settings: Notify | None, run_dir: Folder, warn: Callable[[str], object]
) -> Iterator[Callable[[int], int]]:
    """For a supervisor: yields a function that records the exit code of the run and returns it; at the end of the
    context, how the run ended is sent.

    `settings` is None on all hosts but the first. EnvironmentFault if the settings do not allow to send anything.
    """
    notifier, codes = Notifier(settings, run_dir, warn, LIMIT), []
    starts = notifier.starts

    def note(code: int) -> int:
        codes.append(code)
        return code

    try:
        yield note
    except BaseException as error:
        notifier.ended(*_code_and_reason(error))
        raise
    started = notifier.starts > starts
    for code in codes:
        if code or started:  # otherwise the run was already finished before
            notifier.ended(code, "" if started else _cause_of(code))


def _code_and_reason(error: BaseException) -> tuple[int, str]:
    """The exit code and the reason for an error, with the same mapping as the command line."""
    known = user_error(error)
    return (known.exit_code, known.message) if known else (DtrainError.exit_code, f"{type(error).__name__}: {error}")


def _cause_of(code: int) -> str:
    """The reason derived from the exit code alone, for an end that no process could record."""
    if code == Hung.exit_code:
        return "a process made no progress"
    if code == Exhausted.exit_code:
        return "restarted too often without a new checkpoint; the output of the run shows the cause"
    with suppress(ValueError):
        if code > KILLED:
            return f"a process was killed by {signal.Signals(code - KILLED).name}"
    return f"a process ended with exit code {code}; the output of the run shows the cause"
