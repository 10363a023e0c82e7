"""Limits that end a run without a signal: a stop request in its folder, its time limit, and too many starts without a
new checkpoint.

Only process 0 checks and counts, in a thread, so that the training loop is not slowed down. A result from before the
rendezvous is sent to the other processes there (`parallel/rendezvous.py`); later, all processes agree on the step to
stop at, as for a signal (`train/interrupt.py`).
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import IntEnum

from dtrain.core import heartbeat
from dtrain.core.counts import hours_text
from dtrain.core.errors import DtrainError, EnvironmentFault, Exhausted, Stopped, StopRequested, cause
from dtrain.core.files import overwrite, read_json
from dtrain.core.lease import in_use
from dtrain.core.run_dir import LARGEST, Folder, saved_steps
from dtrain.core.types import JsonObject


@dataclass(frozen=True)
class Usage:
    """The usage of the starts of one launch so far, and the time of all launches of the run."""

    starts: int = 0
    wasted: int = 0
    """Consecutive starts before the latest one that committed no new checkpoint."""
    newest: int = -1
    """The newest committed step when the latest start began; -1 for none."""
    seconds: float = 0.0
    """Wall time of all starts, those of earlier launches of the run as well; the time between them does not count."""

    def next_start(self, committed: int) -> "Usage":
        """The usage after one more start, whose newest committed step is `committed`."""
        if not self.starts or committed > self.newest:
            return replace(self, starts=self.starts + 1, wasted=0, newest=committed)
        # a damaged checkpoint may have been renamed meanwhile: then checkpoints above the lower step are new
        return replace(self, starts=self.starts + 1, wasted=self.wasted + 1, newest=min(self.newest, committed))


def read_usage(folder: Folder, launch: str) -> Usage:
    """The usage of that launch, with the time of the launches before it. EnvironmentFault if the file is damaged."""
    values = _read(folder)
    if launch in values or not launch:
        return Usage(**values[launch]) if launch in values else Usage()
    # a new launch begins with no starts; the time limit is that of all launches of the run
    return Usage(seconds=max((one["seconds"] for other, one in values.items() if other), default=0.0))


def write_usage(folder: Folder, launch: str, usage: Usage) -> None:
    """Replace the entry of that launch. OSError if the file cannot be written."""
    unlaunched = {"": values} if launch and (values := _read(folder).get("")) else {}
    overwrite(folder.usage, json.dumps(unlaunched | {launch: asdict(usage)}) + "\n")


def _read(folder: Folder) -> dict[str, JsonObject]:
    hint = f"move {folder.usage} away: time and starts are then counted from 0"
    try:
        values = read_json(folder.usage)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{folder.usage} cannot be read: {cause(error)}", hint) from error
    if not isinstance(values, dict) or not all(map(_is_usage, values.values())):
        raise EnvironmentFault(f"{folder.usage} is damaged: it does not have the expected fields", hint)
    return values


def _is_usage(values: object) -> bool:
    types = {name: float if name == "seconds" else int for name in asdict(Usage())}
    if not isinstance(values, dict) or values.keys() != types.keys():
        return False
    return all(
        isinstance(value, int | types[name]) and not isinstance(value, bool) and abs(value) < LARGEST
        for name, value in values.items()
    )


LOOK = 5.0
"""Seconds between checks for a stop request; on a mounted bucket each check is a network request."""
NOTE = 30.0
"""Seconds between updates of the time used in usage.json; a hard kill loses at most this much."""


class Request(IntEnum):
    """Why a run should save and exit with code 0."""

    NONE = 0
    STOP = 1
    HOURS = 2


@dataclass(frozen=True)
class Limits:
    """The limits of one launch; for a run that was not launched, of all its starts."""

    launch: str = ""
    """The id of the launch; empty if the run was not started by `dtrain launch`."""
    hours: float | None = None
    """Limit on the wall time of all starts together, in hours; None for no limit."""
    restarts: int = 0
    """Maximum number of consecutive restarts without a new checkpoint. Applied here to launched runs only; for other
    runs the supervisor applies it."""


class RunControl:
    """Watches for requests to end this start of a run, and decides whether it may begin.

    `lead`: whether this is process 0. `now`: a clock in seconds.
    """

    def __init__(
        self, folder: Folder, limits: Limits, *, lead: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self.limits, self._lead, self._now = folder, limits, lead, now
        self.requested = Request.NONE
        self._refused: DtrainError | None = None
        self._listener: Callable[[], object] | None = None
        self._spent: Callable[[float, str], object] | None = None
        self._began, self._before = now(), Usage()
        self._lock, self._writing, self._done = threading.Lock(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="run-control", daemon=True)

    def begin(self) -> None:
        """Record this start, or the reason why it must not begin, and start to watch for requests.

        EnvironmentFault if the run folder cannot be written.
        """
        if self._lead or self.limits.launch:  # every process of a launch decides from the same usage.json
            self._before = read_usage(self._folder, self.limits.launch)
            if self._folder.read_record().get("state") != "finished":
                self._admit()
        if self._lead:
            self._thread.start()

    def look(self) -> None:
        """Look for a stop request now: a signal to end may come with one, before the watching thread has seen it."""
        if not self.requested and self._stop_request():
            with self._lock:
                self.requested = Request.STOP

    def refusal(self) -> DtrainError | None:
        """The error with which this start must end before its rendezvous; None if it may continue."""
        return self._refused or (self.error(self.requested) if self.requested else None)

    def attach(self, listener: Callable[[], object]) -> None:
        """Call `listener` when a request arrives, from another thread; at once if one has arrived already."""
        with self._lock:
            self._listener = listener
        if self.requested:
            listener()

    def report_share(self, spent: Callable[[float, str], object]) -> None:
        """Call `spent` every few seconds, from another thread, with the used share of the time limit and its name."""
        self._spent = spent

    def error(self, request: Request, step: int | None = None) -> StopRequested:
        """The error that ends the run on this request: after `step` was saved, or if None before the first step."""
        if request is Request.HOURS:
            limit = f"the time limit of {hours_text(self.limits.hours or 0)} is reached"
            message = limit if step is None else f"{limit}; saved at step {step}"
            return StopRequested(
                message, "to continue, raise --hours or launch.hours in the recipe and run the same command again"
            )
        where = "before the first step of this start" if step is None else f"at step {step}, saved"
        path = self._folder.stop_request
        return StopRequested(f"stopped on request {where}", f"a launched run does not start while {path} exists")

    def close(self) -> None:
        """Stop watching and record the time used. Nothing is written after this."""
        if self._thread.ident is not None and not self._done.is_set():
            self._done.set()
            self._note_time(last=True)

    def _admit(self) -> None:
        """Refuse this start, or record it."""
        launch, stopped = self.limits.launch, self._stop_request()
        if stopped or self._hours_over():
            self._refused = self.error(Request.STOP if stopped else Request.HOURS)
            return
        if not launch:
            return
        latest = heartbeat.read(self._folder.heartbeat(0))  # of a start that resumed from a copy in memory
        committed = max(next(iter(saved_steps(self._folder.checkpoints)), -1), latest.first if latest else -1)
        if self._lead:
            self._folder.prepare()
            self._before = self._before.next_start(committed)
            write_usage(self._folder, launch, self._before)
        wasted = self._before.wasted
        if wasted > self.limits.restarts and committed <= self._before.newest:
            message = f"{wasted} starts in a row saved no new checkpoint (--restarts {self.limits.restarts})"
            hint = "`dtrain launch logs` and log.txt show why they ended; `dtrain launch up` resets the count"
            self._refused = Exhausted(message, hint)

    def _watch(self) -> None:
        last_check = last_note = self._began
        while not self._done.wait(self._pause()):
            now = self._now()
            if not self.requested and self._hours_over():
                self._request(Request.HOURS)
            if not self.requested and now - last_check >= LOOK:
                last_check = now
                if self._stop_request():
                    self._request(Request.STOP)
            if now - last_note >= NOTE:
                last_note = now
                self._note_time()
            if self._spent and self.limits.hours is not None:
                name = f"its time limit of {hours_text(self.limits.hours)}"
                self._spent(self._seconds() / (3600 * self.limits.hours), name)

    def _pause(self) -> float:
        """Seconds until the next check; less if the time limit is reached before."""
        if self.limits.hours is None or self.requested:
            return LOOK
        return min(max(3600 * self.limits.hours - self._seconds(), 0.01), LOOK)

    def _request(self, request: Request) -> None:
        with self._lock:
            self.requested = request
            listener = self._listener
        if listener:
            listener()

    def _stop_request(self) -> bool:
        try:
            return self._folder.stop_request.exists()
        except OSError:  # a temporary error of the file system: the next check tries again
            return False

    def _seconds(self) -> float:
        return self._before.seconds + self._now() - self._began

    def _hours_over(self) -> bool:
        return self.limits.hours is not None and self._seconds() >= 3600 * self.limits.hours

    def _note_time(self, *, last: bool = False) -> None:
        if self._refused or not (self.limits.launch or self._listener):
            return  # this start does not train, or it is not launched and does not hold the lease yet
        # one write at a time: each replaces the file by way of the same temporary file
        with self._writing, suppress(DtrainError, OSError):  # such as a full disk, which the run itself reports
            if last or not self._done.is_set():
                write_usage(self._folder, self.limits.launch, replace(self._before, seconds=self._seconds()))


def clear_stale_request(folder: Folder, say: Callable[[str], object]) -> None:
    """Remove the stop request of an earlier start, unless a running process still uses the folder."""
    if folder.stop_request.exists() and not in_use(folder.lease):
        with suppress(OSError):
            folder.stop_request.unlink()
            say(f"removed {folder.stop_request}, the stop request of an earlier start")


def note_end(folder: Folder, error: DtrainError) -> None:
    """Write to run.json why a start ended before it could do so itself, unless another process uses the folder."""
    with suppress(DtrainError, OSError):
        record = folder.read_record()
        if record.get("state", "finished") != "finished" and not in_use(folder.lease):
            state = "stopped" if isinstance(error, Stopped) else "failed"
            end = {"state": state, "reason": error.message, "exit_code": error.exit_code, "ended": time.time()}
            folder.write_record(record | end)
