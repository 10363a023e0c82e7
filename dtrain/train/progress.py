"""What a run decides by a metric of its evaluations: to stop early, and to lower the learning rate on a plateau."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from dtrain.assembly.state import State
from dtrain.core.counts import counted
from dtrain.core.metrics import Watch
from dtrain.core.types import JsonObject
from dtrain.optim.update import plateau_scale, with_plateau_scale
from dtrain.train.loop import StepEvent


@dataclass
class Improvement:
    """The best value of a watched metric so far, and how many evaluations have not improved it since."""

    watch: Watch
    rising: bool
    """Whether a higher value is better."""
    best: float | None = None
    at: int = 0
    """The step of the best value."""
    since: int = 0
    """Evaluations without an improvement."""

    def note(self, step: int, value: float) -> None:
        """Take the value of an evaluation into account."""
        change = 0.0 if self.best is None else (value - self.best) * (1 if self.rising else -1)
        if self.best is None or change > self.watch.min_delta:
            self.best, self.at, self.since = value, step, 0
        else:
            self.since += 1

    @property
    def stalled(self) -> bool:
        """Whether there was no improvement for the evaluations of `patience`."""
        return self.since >= self.watch.patience

    @property
    def text(self) -> str:
        """Why it counts as stalled."""
        evaluations = counted(self.since, "evaluation")
        return f"{self.watch.metric} has not improved on {self.best:.6g} of step {self.at} in {evaluations}"

    @property
    def plain(self) -> JsonObject:
        """As JSON values, for a checkpoint."""
        return {"metric": self.watch.metric, "best": self.best, "at": self.at, "since": self.since}

    def recall(self, values: JsonObject | None) -> None:
        """Restore what a checkpoint saved; of another metric it starts anew."""
        if values and values["metric"] == self.watch.metric:
            self.best, self.at, self.since = values["best"], values["at"], values["since"]


@dataclass
class Progress:
    """The hook that decides by metrics of evaluations. Its state is saved with every checkpoint."""

    stop: Improvement | None = None
    rate: Improvement | None = None
    """Of a schedule of kind plateau."""
    lowered: Callable[[float], float] = lambda scale: scale
    """What follows on a scale of the learning rate."""
    say: Callable[[str], object] = lambda _: None
    saved: Mapping[str, JsonObject] = field(default_factory=dict)
    """What the checkpoint has that the run resumed from."""

    def __post_init__(self) -> None:
        for name, improvement in self._parts.items():
            improvement.recall(self.saved.get(name))

    @property
    def _parts(self) -> dict[str, Improvement]:
        return {name: part for name, part in (("stop", self.stop), ("rate", self.rate)) if part}

    @property
    def decides(self) -> bool:
        """Whether there is anything that it may decide."""
        return bool(self._parts)

    @property
    def plain(self) -> JsonObject:
        """Its state as JSON values."""
        return {name: part.plain for name, part in self._parts.items()}

    @property
    def stopped(self) -> str:
        """Why the run stops early; empty if it does not."""
        return self.stop.text if self.stop and self.stop.stalled else ""

    def __call__(self, event: StepEvent) -> None:
        if event.state is not None and event.results:
            event.state = self.after(event.step, event.state, event.results)
            event.stopping |= bool(self.stopped) and not event.last

    def after(self, step: int, state: State, results: Mapping[str, float]) -> State:
        """The state after an evaluation: with a lower learning rate if the metric of its schedule is stalled."""
        for part in self._parts.values():
            if part.watch.metric in results:
                part.note(step, results[part.watch.metric])
        return self._lowered(step, state) if self.rate and self.rate.stalled else state

    def _lowered(self, step: int, state: State) -> State:
        assert self.rate
        before = plateau_scale(state.optimizer)
        was = float(jax.device_get(before))
        now = self.lowered(was)
        if now == was:  # it is as low as it may become
            return state
        self.say(f"step {step}: {self.rate.text}; the learning rate is now {now:.3g} of its peak")
        self.rate.since = 0
        with jax.transfer_guard("allow"):
            scale = jax.device_put(jnp.float32(now), before.sharding)
        return replace(state, optimizer=with_plateau_scale(state.optimizer, scale))
