"""Send notifications when a run ends, resumes, or has used a set fraction of its time limit.

Each event is sent by one process. Process 0 sends `resumed` and `budget`. The end of the run is sent by the process
whose exit code the caller gets: the supervisor on the first host if there is one, else process 0.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from dtrain.core.errors import Aborted, DtrainError, Exhausted, Hung, Locked, Stopped, user_error
from dtrain.core.files import overwrite, read_json
from dtrain.core.parent import is_supervised
from dtrain.core.process_info import launch_id
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject
from dtrain.track.delivery import LIMIT, LONGEST, Channel, Notification
from dtrain.track.notify import Event, Notify

ORDER = 2.0
"""Maximum seconds that a notification waits for earlier ones, so that they arrive in order."""
KILLED = 128
"""An exit code above this means that signal number (exit code - 128) ended the process."""

Close = Callable[[str, str, int], int]
"""(state, reason, exit code) → exit code: called before a process ends at once, for example on a second signal."""


@dataclass
class Notifier:
    """Sends the events of one run from this process, each in its own thread, so that training does not wait."""

    settings: Notify | None
    """None if this process sends nothing."""
    place: Folder
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
        self._channels = self.settings.channels() if self.settings else []

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
        path, launch = self.place.path / "notified.json", launch_id()
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
            return self.place.read_record()
        return {}

    def _send(self, event: Event, state: str, record: JsonObject, **values: Any) -> None:
        if not self.settings or event not in self.settings.on:
            return
        values["reason"] = " ".join(values["reason"].split())[:LONGEST]
        step, steps = record.get("step", 0), record.get("steps")
        notification = Notification(
            event=event, run=self.place.path.name, state=state, step=step, steps=steps, **values
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
    settings: Notify | None, place: Folder, warn: Callable[[str], object], patience: float
) -> Iterator[Notifier]:
    """A notifier for a training process; at the end of the context it sends how the run ended.

    `patience`: seconds after which the supervisor considers this process as hanging. EnvironmentFault if the settings
    do not allow to send anything.
    """
    notifier = Notifier(settings, place, warn, min(LIMIT, patience / 2) if is_supervised() else LIMIT)
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
    settings: Notify | None, place: Folder, warn: Callable[[str], object]
) -> Iterator[Callable[[int], int]]:
    """For a supervisor: yields a function that records the exit code of the run and returns it; at the end of the
    context, how the run ended is sent.

    `settings` is None on all hosts but the first. EnvironmentFault if the settings do not allow to send anything.
    """
    notifier, codes = Notifier(settings, place, warn, LIMIT), []
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
