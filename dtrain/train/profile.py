"""Profile some steps of a run with JAX's profiler, and say in words where their time went.

The trace (XPlane for XProf and TensorBoard, and a Perfetto trace) lies in the run folder.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from dtrain.core.files import overwrite, read_json
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject
from dtrain.recipe.recipe import Profile
from dtrain.train.loop import StepEvent
from dtrain.train.timers import Clock
from dtrain.train.trace_summary import instructions_of, read, summarised

LOOK = 1.0
"""Seconds between two looks for a request."""
MOST = 1000
"""Most steps of one profile: traces grow by megabytes a step."""


@dataclass
class Profiler:
    """Traces the steps that the recipe names, and those that `dtrain profile` asks for while the run trains."""

    place: Folder
    program: Callable[[], str | None]
    """The text of the compiled step."""
    section: Profile | None
    clock: Clock
    say: Callable[[str], object]
    _until: int = 0
    _began: tuple[int, float, float] = (0, 0.0, 0.0)
    _next: float = field(default=0.0)

    def begin(self, step: int) -> None:
        """Called before the first step of a start, which follows `step`."""
        if self.section and self.section.start == step + 1:
            self._start(step, self.section.steps)

    def ends(self, step: int) -> bool:
        """Whether the recipe's profile begins or ends after this step."""
        return bool(self.section) and step - self.section.start + 1 in (0, self.section.steps)

    def waits(self, step: int) -> bool:
        """Whether the hook must be called before a next step is dispatched."""
        return bool(self._until) or self.ends(step) or self.place.profile_request.exists()

    def __call__(self, event: StepEvent) -> None:
        if event.state is None:
            return
        if self._until:
            if event.step >= self._until or event.last or event.stopping:
                jax.block_until_ready(event.metrics)
                self._stop(event.step)
        elif self.section and event.step + 1 == self.section.start and not event.last:
            jax.block_until_ready(event.metrics)
            self._start(event.step, self.section.steps)
        elif (now := time.monotonic()) >= self._next:
            self._next = now + LOOK
            if self.place.profile_request.exists() and not event.last:
                jax.block_until_ready(event.metrics)
                self._start(event.step, _asked(self.place.profile_request))

    def _start(self, step: int, steps: int) -> None:
        self._until = step + steps
        jax.profiler.start_trace(str(self.place.profile), create_perfetto_trace=True)
        self._began = step, time.perf_counter(), self.clock.of("data")

    def _stop(self, step: int) -> None:
        first, since, waited = self._began
        seconds = time.perf_counter() - since
        with self.clock("profile"):
            jax.profiler.stop_trace()
            known = instructions_of(self.program() or "")
            found = summarised(
                read(self.place.profile, known), known, step - first, seconds, self.clock.of("data") - waited
            )
            text = [f"profile of steps {first + 1} to {step}: {found.lines()[0]}", *found.lines()[1:]]
            files = self.place.profile.rglob("perfetto_trace.json.gz")
            newest = max(files, key=lambda path: path.stat().st_mtime, default=self.place.profile)
            text.append(f"  trace: {newest.parent}; ui.perfetto.dev opens {newest.name}")
            for line in text:
                self.say(line)
            values: JsonObject = {"first": first + 1, "last": step, "text": text, **vars(found)}
            overwrite(self.place.profile / "summary.json", json.dumps(values, indent=2) + "\n")
            with suppress(OSError):
                self.place.profile_request.unlink(missing_ok=True)
        self._until = 0


def _asked(path: Path) -> int:
    """The number of steps in a request."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        values: Any = read_json(path)
        return min(max(int(values["steps"]), 1), MOST)
    return 5
