"""Requests to stop: the first one saves and exits. Further SIGTERMs change nothing; a second request by Ctrl-C exits at
once, without saving."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import jax

from dtrain.core import signals
from dtrain.core.errors import NO_MEMORY, Aborted, DtrainError, EnvironmentFault, Stopped
from dtrain.core.parent import is_supervised
from dtrain.core.run_control import Request, RunControl
from dtrain.core.run_dir import REQUESTED

SAME, SAME_SUPERVISED = 0.3, 2.0
"""Seconds within which a second signal may be the same request, sent twice: `timeout` signals its command, and then the
process group that the command is in; the supervisor forwards what its processes may have received as well."""

Close = Callable[[str, str, int], int]
"""(state, reason, exit code) → exit code. Records how the run ended, unless recorded already, and releases its lock."""


@dataclass
class Interrupt:
    """Whether this process was asked to stop, and by what: a signal, or the run's control.

    The phase decides what a request does. `training`: the loop stops after the current step. `starting`: the process
    exits at once, since there is nothing to save. `finishing`: the last step is done, and the run ends by itself.
    """

    say: Callable[[str], object]
    close: Close = lambda _state, _reason, code: code
    control: RunControl | None = None
    signal: str = ""
    phase: Literal["starting", "training", "finishing"] = "starting"
    since: float = 0.0
    noted: Callable[[str], object] = lambda _by: None
    """Called with what asked the run to stop."""
    _asked: int = 0

    def agreed(self, _step: int = 0) -> bool:
        """Whether to stop here: the same in every process. All processes must call it equally often."""
        if jax.process_count() == 1:
            return bool(self.signal)
        from jax.experimental import multihost_utils

        self._asked += 1  # a count of calls, since step numbers decrease after a rollback
        return multihost_utils.reached_preemption_sync_point(self._asked)

    def end(self, step: int, steps: int, exchange: Callable[[tuple[int, int]], tuple[int, int]]) -> Stopped:
        """The error that ends the run after all processes agreed to stop and saved `step`. The request that process 0
        received decides for all; `exchange` gives every process the numbers of process 0."""
        if self.control:
            self.control.look()
            request = int(self.control.requested)
            if jax.process_count() > 1:
                request, _ = exchange((request, 0))
            if request:
                self.noted(REQUESTED)  # the signal by which the processes agreed to stop may be another one's
                return self.control.error(Request(request), step)
        return Stopped(f"saved at step {step} of {steps}", "run the same command again to resume")

    def react(self, number: int) -> None:
        """Handle a signal, in any thread."""
        name = signal.Signals(number).name
        if not self.signal:
            hint = "run the same command again to resume"
            self._stop(name, Stopped(f"{name}: stopped before the first step of this start", hint))
            self.since = time.monotonic()  # the reaction may have taken longer than the next signal to arrive
        elif number == signal.SIGINT and time.monotonic() - self.since > (SAME_SUPERVISED if is_supervised() else SAME):
            self._leave("aborted", Aborted("stopped at once, without saving"))

    def attach(self, control: RunControl) -> None:
        """Handle the requests of that control as well."""
        self.control = control
        control.attach(self._request)

    def _request(self) -> None:
        with signals.held():
            if self.control and not self.signal:
                self._stop(REQUESTED, self.control.error(self.control.requested))

    def _stop(self, why: str, unstarted: Stopped) -> None:
        """Stop after the current step, or at once with `unstarted` if there is nothing to save."""
        self.signal = why
        self.noted(why)
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's preemption service forwards it to all processes
        elif self.phase == "starting":
            self._leave("stopped", unstarted)
        action = "the last step is done" if self.phase == "finishing" else "saving after this step"
        text = f"{why}: {action}; a second Ctrl-C exits at once, without saving"
        threading.Thread(target=self._show, args=(text,), daemon=True).start()  # printing may block

    def _show(self, text: str) -> None:
        with suppress(DtrainError, OSError):  # a full disk is reported by the main thread
            self.say(text)

    def without_memory(self) -> None:
        """End the process at once: whoever waits for what failed would wait forever."""
        self._leave("failed", EnvironmentFault("out of memory", NO_MEMORY))

    def _leave(self, state: str, error: DtrainError) -> None:
        hint, code = f"hint: {error.hint}\n" if error.hint else "", error.exit_code
        try:
            code = self.close(state, error.message, code)
        finally:  # where memory is short, the record of the end may fail
            signals.leave(code, f"{'error' if state == 'failed' else 'stopped'}: {error.message}\n{hint}")


@contextmanager
def listening(say: Callable[[str], object]) -> Iterator[Interrupt]:
    """Handle SIGINT, SIGTERM, and errors of memory that are lost in a callback, inside this context.

    In a run of several processes, JAX's preemption service catches SIGTERM and forwards it to all of them.
    """
    interrupt, before = Interrupt(say), sys.unraisablehook

    def unraisable(shown: "sys.UnraisableHookArgs") -> None:
        if issubclass(shown.exc_type, MemoryError):
            try:
                interrupt.without_memory()
            finally:  # not even the text of the error may have memory
                os._exit(EnvironmentFault.exit_code)
        before(shown)

    sys.unraisablehook = unraisable
    try:
        with signals.reacting(interrupt.react, several=jax.process_count() > 1):
            yield interrupt
    finally:
        if sys.unraisablehook is unraisable:  # else a Store has installed its own for the rest of the process
            sys.unraisablehook = before
