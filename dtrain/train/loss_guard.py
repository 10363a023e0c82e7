"""The policy for a loss that is not finite, or that spikes."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from dtrain.core.errors import NotFinite
from dtrain.recipe.recipe import Guard
from dtrain.train.loop import StepEvent

WINDOW, FEWEST = 50, 20
"""Number of recent losses whose median a spike is compared with, and the least number needed for that."""

CAUSES = "lower optimizer.lr, add warm-up, or set optimizer.clip; guard.nan: locate names the operation"


class Rollback(NotFinite):
    """The run must roll back to the newest checkpoint and skip the batches before `batch`."""

    def __init__(self, batch: int, reason: str) -> None:
        super().__init__(reason, CAUSES)
        self.batch = batch
        """The first batch that may be used after the rollback."""


@dataclass
class LossGuard:
    """Checks the loss of each step one step late, so that the devices never wait for the host.

    With `not_finite: stop` and no `spike` this hook does nothing: logging and saving check their own values.
    """

    guard: Guard
    batches_skipped: int = 0
    """Batches skipped so far: step k trains on batch k + batches_skipped."""
    due: Callable[[int], bool] = lambda _step: True
    """Whether the state is used after this step (saved, evaluated): then its loss is checked before that."""
    skipped: int = 0
    """Updates that were skipped because they were not finite."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _before: tuple[int, dict[str, Any]] | None = None

    @property
    def state(self) -> dict[str, object]:
        """The state of this guard, which a checkpoint saves so that a restart continues exactly."""
        return {"skipped": self.skipped, "losses": list(self.losses) if self.guard.spike else []}

    def recall(self, state: Mapping[str, Any]) -> None:
        """Restore the state that a checkpoint saved."""
        self.skipped = state["skipped"]
        self.losses.extend(state["losses"])

    def __call__(self, event: StepEvent) -> None:
        if self.guard.not_finite == "stop" and self.guard.spike is None:
            return
        if self._before:
            self._look(*self._before)
        self._before = (event.step, event.metrics)
        if event.state is not None and (event.last or event.stopping or self.due(event.step)):
            self._look(*self._before)
            self._before = None

    def _look(self, step: int, metrics: dict[str, object]) -> None:
        values = jax.device_get({name: metrics[name] for name in ("loss", "finite")})
        loss = float(values["loss"])
        if not values["finite"]:
            self._not_finite(step, loss)
        elif self.guard.spike and len(self.losses) >= FEWEST:
            median = statistics.median(self.losses)
            if median > 0 and loss > self.guard.spike * median:
                reason = f"loss is {loss:.4g} at step {step}, {loss / median:.1f} times the median before it"
                raise (
                    Rollback(step + self.batches_skipped, reason)
                    if self.guard.on_spike == "rollback"
                    else NotFinite(reason, CAUSES)
                )
        if values["finite"]:
            self.losses.append(loss)

    def _not_finite(self, step: int, loss: float) -> None:
        what = f"loss is {loss}" if not math.isfinite(loss) else "the gradients are not finite"
        reason = f"{what} at step {step}"
        if self.guard.not_finite == "rollback":
            raise Rollback(step + self.batches_skipped, reason)
        if self.guard.not_finite == "skip":
            self.skipped += 1
            if self.skipped <= self.guard.budget:
                return
            reason += f"; {self.guard.budget} updates were skipped before it (guard.budget)"
        raise NotFinite(reason, CAUSES)
