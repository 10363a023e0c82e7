"""Sends the events of a run when it ends, resumes, or has spent a share of its limit.

One process sends each event. `resumed` and `budget` are sent by process 0 of the run. The end is sent by the process
whose exit code the caller gets: the supervisor where there is one, on the first host, else process 0 itself.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from dtrain.core.errors import Aborted, DtrainError, Exhausted, Hung, Locked, Stopped, user_error
from dtrain.core.parent import watched
from dtrain.core.process_info import launch_id
from dtrain.core.run_dir import Folder, overwrite, read_json
from dtrain.track.delivery import LIMIT, LONGEST, Channel, Notification
from dtrain.track.notify import Event, Notify

ORDER = 2.0
"""Seconds that a notification waits for the one before it, so that they arrive in order."""
KILLED = 128
"""Exit codes above this are of a process that a signal ended."""

Close = Callable[[str, str, int], int]
"""(state, reason, exit code) → the exit code: what has to be done where the process ends at once."""


@dataclass
class Notifier:
    """Sends the events of one run from this process, each in a thread of its own: training does not wait for them."""

    settings: Notify | None
    """None where this process sends nothing."""
    place: Folder
    warn: Callable[[str], object]
    wait: float
    """Seconds that the end of the process waits for what is under way."""
    _channels: list[Channel] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _ending: Any = field(default_factory=threading.Lock)
    """Taken by the thread that sends the end, and kept: there is one end."""
    _once: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._channels = self.settings.channels() if self.settings else []

    def resumed(self, step: int, steps: int) -> None:
        """This start resumes from a saved step; a rollback later on is no resume."""
        if step and "resumed" not in self._once:
            self._send("resumed", "running", {"step": step, "steps": steps}, reason=f"resumed from step {step}")
        self._once.add("resumed")

    def spent(self, share: float, limit: str = "its time limit") -> None:
        """Report the share of a limit that is spent, as often as is convenient, from process 0.

        `budget` is sent at the first report of at least `track.notify.share`, once in all starts of a launch.
        """
        if not self.settings or "budget" in self._once or "budget" not in self.settings.on:
            return
        path, launch = self.place.path / "notified.json", launch_id()
        if share < self.settings.share:
            if "below" not in self._once:
                with suppress(OSError):
                    path.unlink(missing_ok=True)  # of an earlier launch, or a shorter limit
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
        """The same, after which the end is sent. A second request to stop leaves at once and sends nothing."""

        def closed(state: str, reason: str, code: int) -> int:
            code = close(state, reason, code)
            if self.settings and not watched() and state != "aborted" and self._ending.acquire(blocking=False):
                self._end(code, reason)
            return code

        return closed

    def ended(self, code: int, reason: str) -> None:
        """Send how the run ended, and wait until that is delivered or given up."""
        if self.settings and self._ending.acquire(
            timeout=self.wait + 1
        ):  # of a signal's thread, which ends the process
            self._end(code, reason)

    def join(self) -> None:
        """Wait for what is under way, `wait` seconds at most."""
        end, (threads, self._threads) = time.monotonic() + self.wait, (self._threads, [])
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self._warn(f"a notification was not delivered within {self.wait:.0f} s")

    def _end(self, code: int, reason: str) -> None:
        record = self._record()
        event = _event_of(code, record.get("state", ""))
        if event:
            written = record.get("reason", "") if record.get("exit_code") == code else ""
            state = {"preempted": "stopped"}.get(event, event)
            self._send(event, state, record, reason=reason or written or _cause_of(code), exit_code=code)
            self.join()

    @property
    def starts(self) -> int:
        """How often the run was started by now."""
        return self._record().get("starts", 0)

    def _record(self) -> Mapping[str, Any]:
        with suppress(DtrainError, OSError):
            return self.place.read_record()
        return {}

    def _send(self, event: Event, state: str, record: Mapping[str, Any], **values: Any) -> None:
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
        except Exception as error:  # whose text may hold the URL
            problem = type(error).__name__
        if problem:
            self._warn(f"`{notification.event}` was not delivered to {channel.name}: {problem}")

    def _warn(self, text: str) -> None:
        with suppress(DtrainError, OSError):
            self.warn(text)


def _event_of(code: int, state: str) -> Event | None:
    """The event that an end with this exit code is; None where the run was left at once, or another start has it."""
    if code in (Aborted.exit_code, Locked.exit_code):
        return None
    if code == Stopped.exit_code:
        return "preempted"
    return "failed" if code else "stopped" if state == "stopped" else "finished"


@contextmanager
def notifying(
    settings: Notify | None, place: Folder, warn: Callable[[str], object], patience: float
) -> Iterator[Notifier]:
    """A notifier for the process of a run, which sends how the run ended when this is left. EnvironmentFault where
    nothing could be sent. `patience`: seconds after which a supervisor takes this process for one that hangs."""
    notifier = Notifier(settings, place, warn, min(LIMIT, patience / 2) if watched() else LIMIT)
    try:
        yield notifier
    except BaseException as error:
        if not watched():
            notifier.ended(*_code_and_reason(error))
        notifier.join()
        raise
    if not watched():
        notifier.ended(0, "")
    notifier.join()


@contextmanager
def supervising(
    settings: Notify | None, place: Folder, warn: Callable[[str], object]
) -> Iterator[Callable[[int], int]]:
    """A function that takes the exit code of a supervised run and returns it; how the run ended is sent when this is
    left. EnvironmentFault where nothing could be sent. `settings` is None on all hosts but the first."""
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
    begun = notifier.starts > starts
    for code in codes:
        if code or begun:  # else it was finished before
            notifier.ended(code, "" if begun else _cause_of(code))


def _code_and_reason(error: BaseException) -> tuple[int, str]:
    """The exit code and the reason of an error, by the mapping that the command line uses."""
    known = user_error(error)
    return (known.exit_code, known.message) if known else (DtrainError.exit_code, f"{type(error).__name__}: {error}")


def _cause_of(code: int) -> str:
    """What is known of an end that no process could write down."""
    if code == Hung.exit_code:
        return "a process made no progress"
    if code == Exhausted.exit_code:
        return "started again too often without a new checkpoint; the output says why"
    with suppress(ValueError):
        if code > KILLED:
            return f"a process was killed by {signal.Signals(code - KILLED).name}"
    return f"a process ended with exit code {code}; the output says why"
