"""The training loop: dispatch a step, fetch the next batch while it runs, call the hooks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from dtrain.assembly.state import State
from dtrain.data.batch import Batch
from dtrain.train.timers import Clock

Step = Callable[[State, Batch], tuple[State, dict[str, Any]]]


@dataclass
class StepEvent:
    """What a hook receives for each step. `metrics` may still be pending on the devices."""

    step: int
    state: State | None
    """None between the steps of one call, where there is no state to read. A hook may replace it at an evaluation."""
    metrics: dict[str, Any]
    last: bool
    stopping: bool
    reached: int
    """The last step of the call that computed this step."""
    results: dict[str, float] = field(default_factory=dict)
    """Metrics that earlier hooks measured at this step."""


class Hook(Protocol):
    """Called for every step."""

    def __call__(self, event: StepEvent) -> None: ...


@dataclass(frozen=True)
class Calls:
    """How the steps of `span` are divided into calls of the compiled step."""

    span: range
    most: int = 1
    """Steps of a call."""
    ends: Callable[[int], bool] = lambda _step: False
    """Whether a call ends at this step, since the state after it is used."""

    def __iter__(self) -> Iterator[range]:
        first = self.span.start
        for step in self.span:
            if step - first + 1 == self.most or step == self.span[-1] or self.ends(step):
                yield range(first, step + 1)
                first = step + 1


def loop(
    step: Step,
    state: State,
    batches: Iterator[Batch],
    *,
    calls: Calls,
    hooks: Sequence[Hook],
    stop: Callable[[int], bool],
    used: Callable[[int], bool],
    clock: Clock,
    one_at_a_time: bool,
) -> tuple[State, bool]:
    """Run the steps, counted from 1; `batches` has one item for each call. Returns the last state and whether the run
    was stopped early.

    At most two calls are in flight, which bounds memory and keeps measured times correct. With `one_at_a_time` (fake
    devices) calls do not overlap, since their collectives would deadlock. The hooks of a call of several steps are
    called while the next call runs, unless the state after it is `used`.
    """
    before: dict[str, Any] = {}
    waiting: tuple[range, dict[str, Any]] | None = None

    def call_hooks(
        numbers: range, metrics: dict[str, Any], state: State | None, stopping: bool
    ) -> tuple[State | None, bool]:
        """Call the hooks for these steps. Returns the state after them, and whether to stop."""
        if calls.most > 1:
            clock.switch("device")
            metrics = jax.device_get(metrics)
            clock.switch("host")
        for i, number in enumerate(numbers):
            own = jax.tree.map(lambda values, i=i: values[i], metrics) if calls.most > 1 else metrics
            at_end = number == numbers[-1]
            event = StepEvent(
                number, state if at_end else None, own, number == calls.span[-1], stopping and at_end, numbers[-1]
            )
            for hook in hooks:
                hook(event)
            stopping |= event.stopping
            state = event.state if at_end else state
        return state, stopping

    with clock("data"):
        batch = next(batches) if calls.span else {}
    with jax.transfer_guard("disallow"):
        for numbers in calls:
            clock.switch("dispatch")
            state, metrics = step(state, batch)
            last = numbers[-1] == calls.span[-1]
            if not last:
                with clock("data"):
                    batch = next(batches)
            clock.switch("device")
            jax.block_until_ready(metrics if one_at_a_time else before)
            clock.switch("host")
            before = metrics
            if waiting:
                call_hooks(*waiting, None, False)
                waiting = None
            stopping = stop(numbers[-1])
            if calls.most > 1 and not (one_at_a_time or last or stopping or used(numbers[-1])):
                waiting = numbers, metrics
                continue
            after, stopping = call_hooks(numbers, metrics, state, stopping)
            assert after is not None
            state = after
            if stopping:
                return state, True
    return state, False
