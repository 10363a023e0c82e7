"""Warn while a run trains, once each: input that is slower than the step, programs compiled between steps."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from dtrain.core.counts import counted
from dtrain.train.loop import StepEvent
from dtrain.train.timers import Clock

COMPILED = "/jax/core/compile/backend_compile_duration"
IN_LOOP = ("data", "dispatch", "device", "host")
"""Sections in which nothing should be compiled; an evaluation or a save may compile once."""
FEWEST = 3
"""Steps between two looks at the waiting time."""
SHORT = 1e-3
"""Seconds of waiting per step below which it is not worth a word."""
ENOUGH = 0.1
"""The same for all steps since the last look: a few slow batches say little."""


@dataclass
class PerformanceWarnings:
    """Looks at the time and the compilations of the steps since the last look, at every logged step."""

    clock: Clock
    every: int
    workers: int
    """Worker processes that load data; 0 for none."""
    warn: Callable[[str], object]
    _reported: set[str] = field(default_factory=set)
    _before: tuple[int, dict[str, float]] | None = None
    _compiled: int = 0
    _waited: float = 0.0
    """Seconds for data until the last event."""
    _longest: float = 0.0
    """The longest wait for data between two events since the last look."""
    _slow_before: bool = False

    def __enter__(self) -> "PerformanceWarnings":
        jax.monitoring.register_event_duration_secs_listener(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._count)

    def _count(self, event: str, duration_secs: float, **_: object) -> None:
        self._compiled += event == COMPILED and self.clock.section in IN_LOOP

    def __call__(self, event: StepEvent) -> None:
        if self._before is None:  # the first batch waits for workers to start, and the first step may compile
            self._before, self._compiled = (event.reached, dict(self.clock.spent)), 0
            self._waited = self.clock.spent.get("data", 0.0)
            return
        waited = self.clock.spent.get("data", 0.0)
        self._longest, self._waited = max(self._longest, waited - self._waited), waited
        step, spent = self._before
        if event.reached - step < FEWEST or not (event.step % self.every == 0 or event.last):
            return
        now = dict(self.clock.spent)
        seconds = {part: now.get(part, 0.0) - spent.get(part, 0.0) for part in IN_LOOP}
        steps, self._before = event.reached - step, (event.reached, now)
        slow = slow_input(seconds, steps)
        # one long wait may be that of a machine which did something else: it says so if it comes again
        if slow and (self._slow_before or slow_input(seconds | {"data": seconds["data"] - self._longest}, steps)):
            self._once("input", self._advice({part: all_of / steps for part, all_of in seconds.items()}))
        self._slow_before, self._longest = slow, 0.0
        if self._compiled:
            programs = counted(self._compiled, "program")
            self._once(
                "compiled",
                f"{programs} compiled between steps {step} and {event.step}, besides the step: data or a tracker calls "
                "JAX with new shapes or new functions; use NumPy there, or jit one function with one shape",
            )
            self._compiled = 0

    def _advice(self, seconds: dict[str, float]) -> str:
        whole = 1e3 * sum(seconds.values())
        head = f"input is slower than the step: {1e3 * seconds['data']:.1f} of {whole:.1f} ms are waiting for a batch"
        more = f"more than data.load.workers={self.workers}" if self.workers else "data.load.workers=4"
        return f"{head}; {more} reads in processes. Large JPEG pictures: data.draft=true, or smaller copies"

    def _once(self, what: str, text: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self.warn(text)


def slow_input(seconds: dict[str, float], steps: int) -> bool:
    """Whether steps wait for data: most of their time, while the devices are never waited for.

    `seconds`: of all the steps, by section. Batches are fetched while the devices compute, so that a wait for data is a
    loss only if the devices were ready before.
    """
    whole, data = sum(seconds.values()), seconds["data"]
    return data > max(ENOUGH, SHORT * steps) and data > 0.5 * whole and seconds["device"] < 0.1 * whole
