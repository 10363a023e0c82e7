"""The hooks that log, evaluate and save between steps."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dtrain.assembly.checksum import StateChecksum, state_checksum
from dtrain.assembly.state import State
from dtrain.assembly.step import NORMS
from dtrain.core.errors import NotFinite
from dtrain.core.metrics import SOURCES
from dtrain.data.batch import Batch
from dtrain.inference.evaluate import BITS, evaluated
from dtrain.inference.outputs import Abandoned
from dtrain.models.nn.model import Loss
from dtrain.train.loop import StepEvent
from dtrain.train.loss_guard import CAUSES
from dtrain.train.save_timer import SaveTimer
from dtrain.train.timers import Clock


def norms_of(metrics: Mapping[str, object]) -> dict[str, float]:
    """The norms by name: norm/grad/blocks.out.weight/3 for layer 3 of a stack."""
    named: Any = jax.device_get(metrics.get(NORMS, {}))
    found = {}
    for kind, values in named.items():
        for path, norm in values.items():
            name = f"norm/{kind}/{path}"
            found |= {f"{name}/{i}": float(x) for i, x in enumerate(norm)} if norm.ndim else {name: float(norm)}
    return found


def losses_of_sources(metrics: Mapping[str, object], names: Sequence[str]) -> dict[str, float]:
    """The mean loss of the step's rows of each source of a mixture; none for a source without rows in this step."""
    sums: Any = jax.device_get(metrics.get(SOURCES, np.zeros((2, 0))))
    return {
        f"train/loss/{name}": float(loss / weight)
        for name, loss, weight in zip(names, *sums, strict=False)
        if weight > 0
    }


def finite(step: int, metrics: Mapping[str, object]) -> dict[str, float]:
    """The metrics as numbers. Raises NotFinite if the loss or the gradient norm is not finite."""
    found = jax.device_get({name: value for name, value in metrics.items() if name not in (NORMS, SOURCES)})
    values = {name: float(value) for name, value in found.items()}
    if not values.pop("finite"):
        bad = next((name for name in ("loss", "grad_norm") if not math.isfinite(values[name])), "the loss")
        raise NotFinite(f"{bad} is {values.get(bad, 'not finite')} at step {step}", CAUSES)
    return values


Report = Callable[[int, dict[str, float]], None]

IN_FLIGHT = 3
"""Evaluation batches that may be pending on the devices at once: a bound on memory."""
ASIDE = ("evaluate", "save", "profile")
"""Sections that do not count as time of steps."""
PARTS = ("data", "dispatch", "device")
"""Sections of a step that are logged: waiting for the batch, dispatching the step, waiting for the devices."""


@dataclass
class Log:
    """Reports the metrics every `every` steps, one step late, so that the devices never wait for the host."""

    every: int
    report: Report
    clock: Clock
    skipping: bool = False
    """Whether updates that are not finite are skipped and the run continues (`guard.not_finite: skip`)."""
    counts: Callable[[int], dict[str, float]] | None = None
    """Rows of each source of a mixture up to a step, as metrics."""
    sources: Sequence[str] = ()
    """The names of the sources of a mixture."""
    step_ms: list[float] = field(default_factory=list)
    """Milliseconds per step of each reported span."""
    _pending: tuple[int, dict[str, object], dict[str, float]] | None = None
    _since: tuple[int, float, dict[str, float]] = (0, 0.0, {})
    _last_times: dict[str, float] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        """Start to measure time, from this step on."""
        self._since = (step, time.perf_counter() - self.clock.of(*ASIDE), dict(self.clock.spent))

    def __call__(self, event: StepEvent) -> None:
        self.flush()
        if event.step % self.every == 0 or event.last or event.stopping:
            self._pending = (event.step, event.metrics, self._times(event.reached))
        if event.last or event.stopping:
            self.flush()

    def flush(self) -> None:
        """Report the pending metrics. Raises NotFinite if their loss or gradients are not finite."""
        if self._pending:
            step, metrics, times = self._pending
            self._pending = None
            if self.skipping and not jax.device_get(metrics["finite"]):
                return
            values = finite(step, metrics)
            norms = norms_of(metrics) if step % self.every == 0 else {}
            norms |= self.counts(step) if self.counts else {}
            norms |= losses_of_sources(metrics, self.sources)
            self.report(step, {f"train/{name}": value for name, value in values.items()} | norms | times)

    def _times(self, step: int) -> dict[str, float]:
        """Milliseconds per step since the last look, up to `step`, the last of its call: its steps share their time."""
        if step == self._since[0] and self._last_times:
            return self._last_times
        now, spent = time.perf_counter() - self.clock.of(*ASIDE), dict(self.clock.spent)
        since, start, before = self._since
        self._since = (step, now, spent)
        steps = max(step - since, 1)
        self.step_ms.append(1e3 * (now - start) / steps)
        parts = {f"time/{part}_ms": spent.get(part, 0.0) - before.get(part, 0.0) for part in PARTS}
        each = {part: 1e3 * seconds / steps for part, seconds in parts.items()}
        self._last_times = {"time/step_ms": self.step_ms[-1]} | each
        return self._last_times


@dataclass
class Evaluation:
    """Evaluates the held-out examples every `every` steps, and after the last step; 0: only then.

    A run that was asked to stop may have little time: it skips the evaluation, which the next start then makes.
    """

    every: int
    compiled: Callable[[State, Batch], Loss]
    batches: Callable[[], Iterator[tuple[str, Batch]]]
    """Batches with the name of their source, in a mixture; else with an empty name."""
    log: Log
    clock: Clock
    bytes_per_token: float | None = None
    """As in `evaluated`."""
    bytes_of_sources: Mapping[str, float] = field(default_factory=dict)
    """The same for each source of a mixture."""
    more: Sequence[Callable[[int, State], dict[str, float]]] = ()
    """What else is done with the state at an evaluation, with the metrics of each: answers to questions, samples,
    measures. It may raise Abandoned if `stop` is so."""
    stop: Callable[[], bool] = lambda: False
    """Whether to stop here; the same in every process."""
    one_at_a_time: bool = False
    """As in `loop`: no two programs may run on the devices at once."""
    abandoned: bool = False
    """Whether the last evaluation was abandoned because the run was asked to stop."""

    def __call__(self, event: StepEvent) -> None:
        if event.state is not None and (event.last or (self.due(event.step) and not event.stopping)):
            measured = self.measure(event.step, event.state)
            event.stopping |= measured is None
            event.results.update(measured or {})

    def due(self, step: int) -> bool:
        """Whether an evaluation is due after this step."""
        return bool(self.every) and step % self.every == 0

    def measure(self, step: int, state: State) -> dict[str, float] | None:
        """Metrics averaged over the whole held-out set; None if the run was asked to stop before the end.

        Raises DataError if all held-out examples have weight 0.
        """
        jax.block_until_ready(state)  # the step's own time ends here
        start, sums, origins = self.clock.of("evaluate"), [], []
        with self.clock("evaluate"):
            for origin, batch in self.batches():
                origins.append(origin)
                self.abandoned = self.stop()
                if self.abandoned:
                    return None
                sums.append(self.compiled(state, batch))
                # wait for the batch that was dispatched IN_FLIGHT batches ago, or for this one
                jax.block_until_ready(sums[-1 if self.one_at_a_time else -IN_FLIGHT :][0])
            sums, scores = jax.device_get(sums), {}
            with jax.transfer_guard("allow"):  # prompts and drawn tokens are transferred one by one
                for one in self.more:
                    self.abandoned = self.stop()
                    if self.abandoned:
                        return None
                    try:
                        scores |= one(step, state)
                    except Abandoned:
                        self.abandoned = True
                        return None
        seconds = self.clock.of("evaluate") - start
        values = evaluated(sums, self.bytes_per_token) | scores
        for origin in dict.fromkeys(filter(None, origins)):
            own = [one for one, its in zip(sums, origins, strict=True) if its == origin]
            for name, value in evaluated(own, self.bytes_of_sources[origin]).items():
                values |= {f"{name}/{origin}": value} if name in ("eval/loss", BITS) else {}
        self.log.flush()
        self.log.report(step, values | {"time/evaluate_s": seconds})
        return values


@dataclass
class Saving:
    """Saves every `every` steps, by time, with a new evaluation of `best`, when stopping and after the last step.

    A state that is not finite is never saved.
    """

    every: int
    best: str | None
    save: Callable[[int, State, Mapping[str, float], StateChecksum], None]
    clock: Clock
    one_at_a_time: bool = False
    """As in `loop`: no two programs may run on the devices at once."""
    skipping: bool = False
    """Whether a step that is not finite leaves the state unchanged (`guard.not_finite: skip`)."""
    flush: Callable[[], object] = lambda: None
    """Writes the pending metrics, which must be on disk before the state that they belong to."""
    timer: SaveTimer = field(default_factory=SaveTimer)
    copy: Callable[[int, State, Mapping[str, float], StateChecksum], None] | None = None
    """Copies the state to the memory of the hosts."""
    copy_every: int = 0
    """Steps between copies; 0: none."""
    saved: int = field(default=-1)
    """The last step that was saved, or -1."""

    def due(self, step: int) -> bool:
        """Whether a save is due after this step. With several processes, all must call this after every call."""
        return self.timer.due(step) or self.due_by_step(step)

    def due_by_step(self, step: int) -> bool:
        """Whether a save is due after this step at any speed."""
        return bool(self.every) and step % self.every == 0

    def copied(self, step: int) -> bool:
        """Whether the state after this step is copied to the memory of the hosts."""
        return bool(self.copy_every) and step % self.copy_every == 0

    def __call__(self, event: StepEvent) -> None:
        if event.state is None:
            return
        saves = self.due(event.step) or self.best in event.results or event.last or event.stopping
        copies = self.copied(event.step) and not (event.last or event.stopping)
        if saves or copies:
            jax.block_until_ready(event.state)  # the step's own time ends here
            self.flush()
            if not self.skipping:
                finite(event.step, event.metrics)
            with self.clock("save"), jax.transfer_guard("allow"):  # orbax transfers arrays implicitly
                checksum = state_checksum(event.step, event.state)
                if self.one_at_a_time:
                    jax.block_until_ready(checksum.sums)
                if copies and self.copy:
                    self.copy(event.step, event.state, event.results, checksum)
                if saves:
                    self.save(event.step, event.state, event.results, checksum)
                    self.saved = event.step
                    self.timer.restart()
