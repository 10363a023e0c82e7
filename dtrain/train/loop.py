"""The training loop: dispatch a step, fetch the next batch while it runs, call the hooks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from dtrain.data.batch import Batch
from dtrain.train.state import State
from dtrain.train.timers import Clock

Step = Callable[[State, Batch], tuple[State, dict[str, Any]]]


@dataclass
class StepEvent:
    """What a hook receives after each step. `metrics` may still be pending on the devices."""

    step: int
    state: State
    metrics: dict[str, Any]
    last: bool
    stopping: bool
    results: dict[str, float] = field(default_factory=dict)
    """Metrics that earlier hooks measured at this step."""


class Hook(Protocol):
    """Called after every step."""

    def __call__(self, event: StepEvent) -> None: ...


def loop(
    step: Step,
    state: State,
    batches: Iterator[Batch],
    *,
    span: range,
    hooks: Sequence[Hook],
    stop: Callable[[int], bool],
    clock: Clock,
    one_at_a_time: bool,
) -> tuple[State, bool]:
    """Run the steps of `span`, counted from 1. Returns the last state and whether the run was stopped early.

    At most two steps are in flight, which bounds memory and keeps measured times correct. With `one_at_a_time` (fake
    devices) steps do not overlap, since their collectives would deadlock.
    """
    before: dict[str, Any] = {}
    with clock("data"):
        batch = next(batches) if span else {}
    with jax.transfer_guard("disallow"):
        for number in span:
            clock.switch("dispatch")
            state, metrics = step(state, batch)
            last = number == span[-1]
            if not last:
                with clock("data"):
                    batch = next(batches)
            clock.switch("device")
            jax.block_until_ready(metrics if one_at_a_time else before)
            clock.switch("host")
            before, event = metrics, StepEvent(number, state, metrics, last, stop(number))
            for hook in hooks:
                hook(event)
            if event.stopping:
                return state, True
    return state, False
