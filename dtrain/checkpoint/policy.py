"""The recipe section `checkpoint`: when the state is saved and which checkpoints are kept."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dtrain.core.metrics import Metric, higher_is_better
from dtrain.core.types import Natural, NonNegative, Positive, Seconds


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """Copies of the state in the memory of the hosts: a run that lost a process or a host resumes from them."""

    every: Positive = 10
    """Steps between copies."""
    copies: Natural = 1
    """Other hosts that hold each part: with 1 the loss of a host is survived, with 0 that of processes."""
    folder: str = "/dev/shm"
    """Where each host keeps them, not shared: in its memory, or on a disk of its own."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state is saved and which checkpoints are kept. It is always saved at the end and when stopped."""

    every: Natural = 0
    """Steps between saves; 0 saves by time only."""
    minutes: NonNegative = 10.0
    """Minutes between saves, in addition to `every`; 0 saves by steps only."""
    keep: Positive = 2
    """How many of the newest checkpoints are kept."""
    best: str | None = None
    """Also keep the best checkpoint by this metric: `eval/accuracy`, or one that a custom model returns."""
    grace: Seconds = 30.0
    """Seconds that a preempted machine has before it is stopped; a save that takes longer gives a warning."""

    memory: InMemory | None = None
    """Copies in the hosts' memory between checkpoints; null: none."""

    def superfluous(self, ranks: Mapping[int, float | None], metrics: Iterable[Metric]) -> list[int]:
        """The saved steps that can be deleted.

        `ranks`: every saved step with its value of `best`, or None. `metrics`: those that the model declares. If it is
        unknown whether higher is better, every step with a value is kept.
        """
        known = {step: rank for step, rank in ranks.items() if rank is not None and math.isfinite(rank)}
        up = higher_is_better(self.best or "", metrics)
        best = sorted(known, key=lambda step: known[step], reverse=bool(up))[:1] if up is not None else [*known]
        return [step for step in sorted(ranks, reverse=True)[self.keep :] if step not in best]
