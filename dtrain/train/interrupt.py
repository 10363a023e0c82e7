"""Being asked to stop: once to save and leave, twice to leave at once."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import jax

from dtrain.errors import Aborted, Stopped


@dataclass
class Interrupt:
    """Whether this process was asked to stop, and by what.

    While `training`, the request is noted and the loop sees to it; before, there is nothing to save.
    """

    signal: str = ""
    training: bool = False

    def agreed(self, step: int) -> bool:
        """Whether to stop after this step. With several processes, all answer alike."""
        if jax.process_count() == 1:
            return bool(self.signal)
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(step)


@contextmanager
def listening(say: Callable[[str], None], leave: Callable[[], None]) -> Iterator[Interrupt]:
    """Catch SIGINT and SIGTERM while inside; `leave` is called before a second one ends the process.

    Where processes run together, JAX's own service catches SIGTERM and spreads the word.
    """
    interrupt = Interrupt()

    def asked(number: int, _: FrameType | None) -> None:
        if interrupt.signal:
            leave()
            os._exit(Aborted.exit_code)
        interrupt.signal = signal.Signals(number).name
        if not interrupt.training:
            raise Stopped(f"{interrupt.signal}: stopped before the first step", "run the same command again to go on")
        say(f"{interrupt.signal}: saving after this step; once more leaves at once")

    numbers = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, asked) for number in numbers}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
