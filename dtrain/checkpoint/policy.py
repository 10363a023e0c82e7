"""When state is saved, and which of it is kept: the recipe's section."""

from collections.abc import Mapping
from dataclasses import dataclass

from dtrain.fields import Natural, Positive, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When state is saved and which of it is kept. It is always saved at the end and when stopped."""

    every: Natural = 0
    """Steps between saves; 0 saves only at the end and when stopped."""
    keep: Positive = 2
    """The newest so many are kept."""
    best: str | None = None
    """Keep the best by this metric too: `eval/accuracy`. Lower is better for loss and perplexity."""
    grace: PositiveFloat = 30.0
    """Seconds that a preempted machine is left; a save that takes longer is warned of."""

    @property
    def lower_is_better(self) -> bool:
        """Whether the best is the smallest."""
        return (self.best or "").endswith(("loss", "perplexity"))

    def superfluous(self, ranks: Mapping[int, float | None]) -> list[int]:
        """Of the saved steps, each with the metric of `best` where it was measured, those that need not be kept."""
        known = {step: rank for step, rank in ranks.items() if rank is not None}
        best = sorted(known, key=lambda step: known[step], reverse=not self.lower_is_better)[:1]
        return [step for step in sorted(ranks, reverse=True)[self.keep :] if step not in best]
