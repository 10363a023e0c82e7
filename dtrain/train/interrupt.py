"""Being asked to stop: once to save and leave, twice to leave at once."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import jax

from dtrain.errors import Aborted, Stopped
from dtrain.parent import watched

SAME = 2.0
"""Seconds within which a second signal may be the first one, sent twice."""


@dataclass
class Interrupt:
    """Whether this process was asked to stop, and by what.

    While `training`, the request is noted and the loop sees to it; before, there is nothing to save.
    """

    signal: str = ""
    training: bool = False
    since: float = 0.0
    _asked: int = 0

    def agreed(self, _step: int) -> bool:
        """Whether to stop after this step. With several processes, all answer alike."""
        if jax.process_count() == 1:
            return bool(self.signal)
        from jax.experimental import multihost_utils

        self._asked += 1  # which, unlike a step, never goes back
        return multihost_utils.reached_preemption_sync_point(self._asked)


@contextmanager
def listening(say: Callable[[str], None], leave: Callable[[], None]) -> Iterator[Interrupt]:
    """Catch SIGINT and SIGTERM while inside; `leave` is called before a second one ends the process.

    Where processes run together, JAX's own service catches SIGTERM and spreads the word.
    """
    interrupt = Interrupt()

    def asked(number: int, _: FrameType | None) -> None:
        if interrupt.signal and watched() and time.monotonic() - interrupt.since < SAME:
            return  # the same request, from the system and from the process that watches
        if interrupt.signal:
            leave()
            os._exit(Aborted.exit_code)
        interrupt.signal, interrupt.since = signal.Signals(number).name, time.monotonic()
        if not interrupt.training:
            raise Stopped(f"{interrupt.signal}: stopped before the first step", "run the same command again to go on")
        say(f"{interrupt.signal}: saving after this step; once more leaves at once")
        if number == signal.SIGINT and jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX tells the others of

    numbers = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, asked) for number in numbers}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
