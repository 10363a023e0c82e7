"""What ends a run from outside without a signal: a stop request in its folder, the hours that it may take, and the
number of starts that saved nothing new.

The first process alone looks and counts, in a thread, so that the training loop is not held up. What it finds before
the processes have met it tells the others there (`parallel/meeting.py`); later all agree on a step as for a signal
(`train/interrupt.py`).
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum

from dtrain.core.errors import DtrainError, Exhausted, Stopped, StopRequested
from dtrain.core.lease import in_use
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.core.usage import Usage, read_usage, write_usage

LOOK = 5.0
"""Seconds between looks for a stop request: on the mount of a bucket each is a request."""
NOTE = 30.0
"""Seconds between notes of the time used: so much is lost in a hard kill."""


class Request(IntEnum):
    """Why a run should save and leave with exit code 0."""

    NONE = 0
    STOP = 1
    HOURS = 2


@dataclass(frozen=True)
class Limits:
    """What one launch may take, or all starts of a run that a person typed."""

    launch: str = ""
    """The id of the launch; empty where a person typed the command."""
    hours: float | None = None
    """Wall time of all starts."""
    restarts: int = 0
    """Starts again in a row without a new checkpoint; bounds launched runs here, others in their supervisor."""


class RunControl:
    """The requests that a start of a run has to answer, and why it may not begin."""

    def __init__(
        self, folder: Folder, limits: Limits, *, lead: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self.limits, self._lead, self._now = folder, limits, lead, now
        self.requested = Request.NONE
        self._refused: DtrainError | None = None
        self._listener: Callable[[], object] | None = None
        self._spent: Callable[[float, str], object] | None = None
        self._began, self._before = now(), Usage()
        self._lock, self._done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="run-control", daemon=True)

    def begin(self) -> None:
        """Note this start, or why it may not begin; from here on look for requests. EnvironmentFault where the run
        folder cannot be written."""
        if self._lead or self.limits.launch:  # the first process tells the others what holds
            self._before = read_usage(self._folder, self.limits.launch)
            if self._folder.read_record().get("state") != "finished":
                self._admit()
        if self._lead:
            self._thread.start()

    def refusal(self) -> DtrainError | None:
        """Why the run must leave, as long as it has not met its other processes."""
        return self._refused or (self.error(self.requested) if self.requested else None)

    def attach(self, listener: Callable[[], object]) -> None:
        """Call this, from another thread, when a request comes; at once where one has come already."""
        with self._lock:
            self._listener = listener
        if self.requested:
            listener()

    def report_share(self, spent: Callable[[float, str], object]) -> None:
        """Call this every few seconds, from another thread, with the share of the hours that is used and their name."""
        self._spent = spent

    def error(self, request: Request, step: int | None = None) -> StopRequested:
        """The end that a request leads to: after that saved step, or before the first one of this start."""
        if request is Request.HOURS:
            what = f"the {self.limits.hours:g} hours that it may take are over"
            after = what if step is None else f"{what}; saved at step {step}"
            return StopRequested(
                after, "give it more: --hours, or launch.hours in the recipe; the same command resumes"
            )
        where = "before the first step of this start" if step is None else f"at step {step}, saved"
        path = self._folder.stop_request
        return StopRequested(f"stopped on request {where}", f"while {path} is there a launched run does not start")

    def close(self) -> None:
        """Look no more, and note the time used."""
        if self._thread.ident is not None and not self._done.is_set():
            self._done.set()
            self._note_time()

    def _admit(self) -> None:
        """Refuse this start, or count it."""
        launch, stopped = self.limits.launch, self._stop_request()
        if stopped or self._hours_over():
            self._refused = self.error(Request.STOP if stopped else Request.HOURS)
            return
        if not launch:
            return
        committed = next(iter(saved_steps(self._folder.checkpoints)), -1)
        if self._lead:
            self._folder.prepare()
            self._before = self._before.next_start(committed)
            write_usage(self._folder, launch, self._before)
        wasted = self._before.wasted
        if wasted > self.limits.restarts and committed <= self._before.newest:
            message = f"{wasted} starts in a row saved nothing new (--restarts {self.limits.restarts})"
            self._refused = Exhausted(message, "see why they ended, in log.txt; `dtrain launch up` counts anew")

    def _watch(self) -> None:
        looked = noted = self._began
        while not self._done.wait(self._pause()):
            now = self._now()
            if not self.requested and self._hours_over():
                self._request(Request.HOURS)
            if not self.requested and now - looked >= LOOK:
                looked = now
                if self._stop_request():
                    self._request(Request.STOP)
            if now - noted >= NOTE:
                noted = now
                self._note_time()
            if self._spent and self.limits.hours is not None:
                self._spent(self._seconds() / (3600 * self.limits.hours), f"its {self.limits.hours:g} hours")

    def _pause(self) -> float:
        """Seconds until the next look, sooner where the hours are over before."""
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
        except OSError:  # of a file system that falters: it is looked for again
            return False

    def _seconds(self) -> float:
        return self._before.seconds + self._now() - self._began

    def _hours_over(self) -> bool:
        return self.limits.hours is not None and self._seconds() >= 3600 * self.limits.hours

    def _note_time(self) -> None:
        if self._refused or not (self.limits.launch or self._listener):
            return  # it trains nothing; or a person's start has not got as far as its lease on the folder
        with suppress(DtrainError, OSError):  # of a full disk, which the run itself reports
            write_usage(self._folder, self.limits.launch, replace(self._before, seconds=self._seconds()))


def clear_stale_request(folder: Folder, say: Callable[[str], object]) -> None:
    """Remove a stop request that an earlier run was sent; one whose run is alive is left to it."""
    if folder.stop_request.exists() and not in_use(folder.lease):
        with suppress(OSError):
            folder.stop_request.unlink()
            say(f"removed {folder.stop_request}, a stop request to an earlier start")


def note_end(folder: Folder, error: DtrainError) -> None:
    """Write into run.json why a start ended before the run itself could, unless another process holds the folder."""
    with suppress(DtrainError, OSError):
        record = folder.read_record()
        if record.get("state", "finished") != "finished" and not in_use(folder.lease):
            state = "stopped" if isinstance(error, Stopped) else "failed"
            end = {"state": state, "reason": error.message, "exit_code": error.exit_code, "ended": time.time()}
            folder.write_record(record | end)
