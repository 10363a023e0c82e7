"""When state is saved, and which of it is kept: the recipe's section."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dtrain.core.metrics import higher_is_better
from dtrain.core.types import Natural, NonNegative, Positive, Seconds


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When state is saved and which of it is kept. It is always saved at the end and when stopped."""

    every: Natural = 0
    """Steps between saves; 0 does not count steps."""
    minutes: NonNegative = 10.0
    """Minutes between saves, whatever `every` is; 0 does not look at the clock."""
    keep: Positive = 2
    """The newest so many are kept."""
    best: str | None = None
    """Keep the best by this metric too: `eval/accuracy`, or one that a custom model returns."""
    grace: Seconds = 30.0
    """Seconds that a preempted machine is left; a save that takes longer is warned of."""

    def superfluous(self, ranks: Mapping[int, float | None], rising: Mapping[str, bool]) -> list[int]:
        """Of the saved steps, each with the metric of `best` where it was measured, those that need not be kept.

        `rising`: the metrics that the model declares, with whether more is better.
        """
        known = {step: rank for step, rank in ranks.items() if rank is not None and math.isfinite(rank)}
        up = higher_is_better(self.best or "", rising)
        best = sorted(known, key=lambda step: known[step], reverse=bool(up))[:1] if up is not None else [*known]
        return [step for step in sorted(ranks, reverse=True)[self.keep :] if step not in best]
