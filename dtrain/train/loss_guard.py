"""What is done about a loss that is not finite, or that leaps."""

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
"""Losses that a leap is measured against, and how many there must be."""

CAUSES = "lower optimizer.lr, add warm-up, or set optimizer.clip; earlier checkpoints are kept"


class Rollback(NotFinite):
    """The run is to go back to the newest checkpoint and pass over the batches before `batch`."""

    def __init__(self, batch: int, reason: str) -> None:
        super().__init__(reason, CAUSES)
        self.batch = batch
        """The first that may be used again."""


@dataclass
class LossGuard:
    """Looks at each step's loss one step late, so that the device never waits for the host.

    Where the policy is to stop, what is logged or saved is looked at anyway, and this hook does nothing.
    """

    guard: Guard
    batches_skipped: int = 0
    """Batches passed over before: step k takes batch k + passed."""
    due: Callable[[int], bool] = bool
    """Whether something is made of the state after a step: it is looked at before that."""
    skipped: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _before: tuple[int, dict[str, Any]] | None = None

    @property
    def seen(self) -> dict[str, Any]:
        """What a restart must know to go on watching as if it had never stopped."""
        return {"skipped": self.skipped, "losses": list(self.losses) if self.guard.spike else []}

    def recall(self, seen: Mapping[str, Any]) -> None:
        """Go on from what was seen before."""
        self.skipped = seen["skipped"]
        self.losses.extend(seen["losses"])

    def __call__(self, event: StepEvent) -> None:
        if self.guard.not_finite == "stop" and self.guard.spike is None:
            return
        if self._before:
            self._look(*self._before)
        self._before = (event.step, event.metrics)
        if event.last or event.stopping or self.due(event.step):
            self._look(*self._before)
            self._before = None

    def _look(self, step: int, metrics: dict[str, Any]) -> None:
        found = jax.device_get({name: metrics[name] for name in ("loss", "finite")})
        loss = float(found["loss"])
        if not found["finite"]:
            self._not_finite(step, loss)
        elif self.guard.spike and len(self.losses) >= FEWEST:
            usual = statistics.median(self.losses)
            if usual > 0 and loss > self.guard.spike * usual:
                reason = f"loss is {loss:.4g} at step {step}, {loss / usual:.1f} times the median before it"
                raise (
                    Rollback(step + self.batches_skipped, reason)
                    if self.guard.on_spike == "rollback"
                    else NotFinite(reason, CAUSES)
                )
        if found["finite"]:
            self.losses.append(loss)

    def _not_finite(self, step: int, loss: float) -> None:
        reason = f"loss is {loss} at step {step}, or its gradients are not finite"
        if self.guard.not_finite == "rollback":
            raise Rollback(step + self.batches_skipped, reason)
        if self.guard.not_finite == "skip":
            self.skipped += 1
            if self.skipped <= self.guard.budget:
                return
            reason += f"; {self.guard.budget} updates were left out before it (guard.budget)"
        raise NotFinite(reason, CAUSES)
