"""What a training costs beside its steps: prices, failures, restarts and saves, with their sources; a file of the
user's own replaces them."""

import math
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, cast

from dtrain.core.chips import CHIPS, PRICED, Chip
from dtrain.core.errors import FieldError, RecipeError
from dtrain.core.types import NonNegative, PositiveFloat
from dtrain.recipe.parse import section
from dtrain.recipe.problems import Problems
from dtrain.recipe.yaml import read

FAILURES = (2.0e-5, 1.24e-4)
"""Failures that end a run, per chip and hour, lowest and highest. Lowest: 419 unexpected interruptions of 16,384 H100
in 54 days (The Llama 3 Herd of Models, section 3.3.4, July 2024). Highest: a mean time to failure of 7.9 hours at 1,024
A100 (Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025). No rate for
each chip of TPUs is published; these stand for them."""
STORAGE = 0.020
"""Dollars for a GB and month in a bucket: Google Cloud, standard class, us-central1
(cloud.google.com/storage/pricing)."""
STAGING = 6.0
"""GB/s with which a host copies a checkpoint out of its devices while training waits: 396 GiB by 16 hosts in 3.3 to 4.1
s are 6.5 to 8.1 (Marin, pull request 7929, 2026); rounded down."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A file of prices and assumptions."""

    date: str = ""
    """When its prices were looked up: 2026-11-01."""
    prices: dict[str, PositiveFloat] = field(default_factory=dict)
    """Dollars for a chip and hour, by chip: {v5e: 0.60, h100: 4.10}; spot, with a commitment, or in another cloud."""
    what: str = "on demand"
    """What the prices are of: on demand, spot, a year's commitment."""
    failures: NonNegative | None = None
    """Failures per chip and hour that end a run; of spot machines with their preemptions."""
    spot: dict[str, PositiveFloat] = field(default_factory=dict)
    """Dollars for a chip and hour of spot machines, for --what-if."""
    spot_failures: NonNegative | None = None
    """Failures and preemptions per chip and hour of those; default: `failures`."""
    restart: PositiveFloat = 5.0
    """Minutes from a failure to the next step, without reading the checkpoint: found, replaced, started, compiled."""
    staging: PositiveFloat = STAGING
    """GB/s with which a host copies a checkpoint out of its devices, while training waits."""
    upload: PositiveFloat = 1.0
    """GB/s between a host and the bucket; saves go there while training continues."""
    storage: NonNegative = STORAGE
    """Dollars for a GB and month in the bucket."""

    def __post_init__(self) -> None:
        known = [chip.name for chip in CHIPS]
        for key, name in [("prices", name) for name in self.prices] + [("spot", name) for name in self.spot]:
            if name in known:
                continue
            raise FieldError(f"{key}.{name}", "there is no such chip", f"the chips are {', '.join(known)}")
        try:
            _ = date.fromisoformat(self.date) if self.date else None
        except ValueError as error:
            raise FieldError("date", f"{self.date!r} is no date", "write 2026-11-01") from error

    def price(self, chip: Chip) -> float | None:
        """Dollars for a chip and hour; the list price where the file has none."""
        return self.prices.get(chip.name, chip.price)

    def source(self, chip: Chip) -> str:
        """Where that price comes from."""
        if chip.name in self.prices:
            return f"{self.what}{f', {self.date}' if self.date else ''}"
        return f"on-demand list price, {PRICED:%Y-%m}"

    def of_spot(self, chip: Chip) -> "Rates | None":
        """The rates with the prices and failures of spot machines; None if this chip has no such price."""
        if chip.name not in self.spot:
            return None
        failures = self.failures if self.spot_failures is None else self.spot_failures
        return replace(self, prices=self.spot, failures=failures, what="spot")

    @property
    def failing(self) -> tuple[float, float]:
        """Lowest and highest rate of failures per chip and hour."""
        return FAILURES if self.failures is None else (self.failures, self.failures)


def read_rates(path: Path) -> Rates:
    """The rates in a YAML file. RecipeError with the places of all mistakes."""
    problems = Problems()
    node = read(path)
    found = section(Rates, node, "", problems) if isinstance(node.value, dict) else None
    if problems.lines or found is None:
        raise RecipeError(problems.lines or f"{path}: expected a mapping, such as prices: {{v5e: 0.60}}")
    return cast(Any, found)


@dataclass(frozen=True)
class Reliability:
    """How failures and saves stretch a run. Times in seconds."""

    failures: float
    """Per second, of all chips together."""
    stall: float
    """Seconds for which training waits for a save."""
    restart: float
    """Seconds from a failure to the next step."""

    def stretch(self, interval: float) -> float:
        """Wall time over the time of the steps, saving each `interval` seconds of them; infinite if failures come
        faster than the run recovers.

        A failure loses half an interval, on average, and the restart: the first order of Daly (2006), "A higher order
        estimate of the optimum checkpoint interval for restart dumps".
        """
        lost = self.failures * (interval / 2 + self.stall + self.restart)
        return (1 + self.stall / interval) / (1 - lost) if lost < 1 else math.inf

    @property
    def best_interval(self) -> float:
        """The interval that loses least: the square root of twice the stall times the mean time between failures (Young
        1974)."""
        return math.sqrt(2 * self.stall / self.failures) if self.failures else math.inf
