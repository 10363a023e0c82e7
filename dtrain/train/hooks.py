"""What happens between steps: logging, evaluating, saving."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from dtrain.core.errors import DataError, NotFinite
from dtrain.data.batch import Batch
from dtrain.models.nn.model import Loss
from dtrain.recipe.recipe import Evaluate
from dtrain.train.checksum import StateChecksum, state_checksum
from dtrain.train.loop import StepEvent
from dtrain.train.loss_guard import CAUSES
from dtrain.train.save_timer import SaveTimer
from dtrain.train.state import State
from dtrain.train.timers import Clock

Report = Callable[[int, dict[str, float]], None]

LARGEST_EXPONENT = 700.0
IN_FLIGHT = 3
"""Batches of an evaluation that may be on their way at once, so that memory is bounded."""
ASIDE = ("evaluate", "save")
"""Sections that are no part of a step's time."""


@dataclass
class Log:
    """Reports every so many steps, one step late, so that the device never waits for the host."""

    every: int
    report: Report
    clock: Clock
    skipping: bool = False
    """Whether updates that are not finite are left out, so that the run goes on after them."""
    step_ms: list[float] = field(default_factory=list)
    """Of every time span that was reported."""
    _pending: tuple[int, dict[str, Any], dict[str, float]] | None = None
    _since: tuple[int, float, float] = (0, 0.0, 0.0)

    def begin(self, step: int) -> None:
        """Start to count time from this step on."""
        self._since = (step, time.perf_counter() - self.clock.of(*ASIDE), self.clock.of("data"))

    def __call__(self, event: StepEvent) -> None:
        self.flush()
        if event.step % self.every == 0 or event.last or event.stopping:
            self._pending = (event.step, event.metrics, self._times(event.step))
        if event.last or event.stopping:
            self.flush()

    def flush(self) -> None:
        """Report what is pending; NotFinite where its loss or gradients are."""
        if self._pending:
            step, metrics, times = self._pending
            self._pending = None
            if self.skipping and not jax.device_get(metrics["finite"]):
                return
            values = finite(step, metrics)
            self.report(step, {f"train/{name}": value for name, value in values.items()} | times)

    def _times(self, step: int) -> dict[str, float]:
        now, data = time.perf_counter() - self.clock.of(*ASIDE), self.clock.of("data")
        since, start, start_data = self._since
        self._since = (step, now, data)
        steps = max(step - since, 1)
        self.step_ms.append(1e3 * (now - start) / steps)
        return {"time/step_ms": self.step_ms[-1], "time/data_ms": 1e3 * (data - start_data) / steps}


def finite(step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics as numbers; NotFinite where the loss or the gradients' norm is not finite."""
    values = {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}
    if not values.pop("finite"):
        bad = next((name for name in ("loss", "grad_norm") if not math.isfinite(values[name])), "the loss")
        raise NotFinite(f"{bad} is {values.get(bad, 'not finite')} at step {step}", CAUSES)
    return values


@dataclass
class Evaluation:
    """Measures the held-out examples every so many steps, and at the end.

    Where the run is to stop, there may be little time: what was due is then left to the next start.
    """

    section: Evaluate
    compiled: Callable[[State, Batch], Loss]
    batches: Callable[[], Iterator[Batch]]
    log: Log
    clock: Clock
    perplexity: bool = False
    """Whether the loss is that of the next token."""
    stop: Callable[[], bool] = bool
    """Whether to stop here; with several processes, all answer alike."""
    one_at_a_time: bool = False
    """As in the loop: nothing may be under way on the devices beside a step."""
    abandoned: bool = False
    """Whether the last measurement was given up, because the run is to stop."""

    def __call__(self, event: StepEvent) -> None:
        if event.last or (self.due(event.step) and not event.stopping):
            measured = self.measure(event.step, event.state)
            event.stopping |= measured is None
            event.results.update(measured or {})

    def due(self, step: int) -> bool:
        """Whether it is measured after this step."""
        return bool(self.section.every) and step % self.section.every == 0

    def measure(self, step: int, state: State) -> dict[str, float] | None:
        """Means over the whole held-out set; None where the run is to stop before they are known."""
        jax.block_until_ready(state)  # the step's own time ends here
        start, found = self.clock.of("evaluate"), []
        with self.clock("evaluate"):
            for batch in self.batches():
                self.abandoned = self.stop()
                if self.abandoned:
                    return None
                found.append(self.compiled(state, batch))
                jax.block_until_ready(found[-1 if self.one_at_a_time else -IN_FLIGHT :][0])
            found = jax.device_get(found)
        seconds = self.clock.of("evaluate") - start
        total = jax.tree.map(lambda *parts: sum(float(part) for part in parts), *found)
        if not total.weight > 0:
            hint = "hold out other examples, or more of them (data.test)"
            raise DataError("no held-out example has any weight: every target of theirs is masked", hint)
        sums = {"loss": total.sum, **total.metrics}
        values = {f"eval/{name}": value / total.weight for name, value in sums.items()}
        if self.perplexity:
            values["eval/perplexity"] = math.exp(min(values.get("eval/nll", values["eval/loss"]), LARGEST_EXPONENT))
        self.log.flush()
        self.log.report(step, values | {"time/evaluate_s": seconds})
        return values


@dataclass
class Saving:
    """Saves every so many steps, when stopping, and at the end; never a state that is not finite."""

    every: int
    best: str | None
    save: Callable[[int, State, Mapping[str, float], StateChecksum], None]
    clock: Clock
    one_at_a_time: bool = False
    """As in the loop: nothing may be under way on the devices beside a step."""
    skipping: bool = False
    """Whether a step that is not finite leaves the state as it was."""
    flush: Callable[[], object] = int
    """Writes the metrics that are pending, before the state that they belong to is saved."""
    timer: SaveTimer = field(default_factory=SaveTimer)
    saved: int = field(default=-1)

    def due(self, step: int) -> bool:
        """Whether the state is saved after this step. With several processes, all ask at every step."""
        return self.timer.due(step) or (bool(self.every) and step % self.every == 0)

    def __call__(self, event: StepEvent) -> None:
        if self.due(event.step) or self.best in event.results or event.last or event.stopping:
            jax.block_until_ready(event.state)  # the step's own time ends here
            self.flush()
            if not self.skipping:
                finite(event.step, event.metrics)
            with self.clock("save"), jax.transfer_guard("allow"):  # orbax moves what it likes
                found = state_checksum(event.step, event.state)
                if self.one_at_a_time:
                    jax.block_until_ready(found.sums)
                self.save(event.step, event.state, event.results, found)
            self.saved = event.step
            self.timer.restart()
