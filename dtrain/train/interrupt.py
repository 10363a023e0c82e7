"""A request to stop: the first one saves and leaves. SIGTERM only ever asks for that, however often it comes; a second
request by Ctrl-C leaves at once."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import jax

from dtrain.core import signals
from dtrain.core.errors import Aborted, DtrainError, Stopped
from dtrain.core.parent import watched
from dtrain.core.run_control import Request, RunControl

SAME = 2.0
"""Seconds within which a second signal may be the first one, sent twice."""

Close = Callable[[str, str, int], int]
"""(state, reason, exit code) → the exit code: notes how the run ended, if that is not noted yet, and frees its lock."""


@dataclass
class Interrupt:
    """Whether this process was asked to stop, and by what: a signal, or the run's control.

    In `training` the request is noted and the loop stops after a step; before, there is nothing to save;
    in `finishing` the last step is done and saved, and the run ends by itself.
    """

    say: Callable[[str], object]
    close: Close = lambda _state, _reason, code: code
    control: RunControl | None = None
    signal: str = ""
    phase: Literal["starting", "training", "finishing"] = "starting"
    since: float = 0.0
    _asked: int = 0

    def agreed(self, _step: int = 0) -> bool:
        """Whether to stop here. With several processes, all answer alike; all call it equally often."""
        if jax.process_count() == 1:
            return bool(self.signal)
        from jax.experimental import multihost_utils

        self._asked += 1  # which, unlike a step, never goes back
        return multihost_utils.reached_preemption_sync_point(self._asked)

    def end(self, step: int, steps: int, exchange: Callable[[tuple[int, int]], tuple[int, int]]) -> Stopped:
        """The error that the run ends with after it has agreed to stop, saved at that step. What the control of the
        first process has found decides for all; `exchange` gives every process the numbers of the first."""
        if self.control:
            request = int(self.control.requested)
            if jax.process_count() > 1:
                request, _ = exchange((request, 0))
            if request:
                return self.control.error(Request(request), step)
        return Stopped(f"saved at step {step} of {steps}", "run the same command again to resume")

    def react(self, number: int) -> None:
        """What is done about a signal, in whatever thread."""
        name = signal.Signals(number).name
        if not self.signal:
            hint = "run the same command again to continue"
            self._stop(name, Stopped(f"{name}: stopped before the first step of this start", hint))
        elif number == signal.SIGINT and not (watched() and time.monotonic() - self.since < SAME):
            self._leave("aborted", Aborted("left at once"))

    def attach(self, control: RunControl) -> None:
        """Answer the requests of that control, too."""
        self.control = control
        control.attach(self._request)

    def _request(self) -> None:
        with signals.held():
            if self.control and not self.signal:
                self._stop("stop requested", self.control.error(self.control.requested))

    def _stop(self, why: str, unstarted: Stopped) -> None:
        """Stop after a step, or with that error at once where there is nothing to save."""
        self.signal, self.since = why, time.monotonic()
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's own service catches it and passes it on to the others
        elif self.phase == "starting":
            self._leave("stopped", unstarted)
        does = "the last step is done" if self.phase == "finishing" else "saving after this step"
        text = f"{why}: {does}; Ctrl-C leaves at once"
        threading.Thread(target=self._show, args=(text,), daemon=True).start()  # printing may block

    def _show(self, text: str) -> None:
        with suppress(DtrainError, OSError):  # of a disk that the main thread finds full, too
            self.say(text)

    def _leave(self, state: str, error: DtrainError) -> None:
        hint = f"hint: {error.hint}\n" if error.hint else ""
        code = self.close(state, error.message, error.exit_code)
        signals.leave(code, f"stopped: {error.message}\n{hint}")


@contextmanager
def listening(say: Callable[[str], object]) -> Iterator[Interrupt]:
    """React to SIGINT and SIGTERM while inside.

    Where processes run together, JAX's own service catches SIGTERM and passes it on.
    """
    interrupt = Interrupt(say)
    with signals.reacting(interrupt.react, several=jax.process_count() > 1):
        yield interrupt
