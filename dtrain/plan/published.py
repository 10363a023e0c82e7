"""How predictions compared with steps that others measured and published, per chip."""

from dataclasses import dataclass

from dtrain.core.chips import Chip


@dataclass(frozen=True)
class Checks:
    """The range of measured over predicted step times in so many published runs."""

    least: float
    most: float
    runs: int


CHECKS = {
    "v5e": Checks(0.96, 1.06, 2),
    "v5p": Checks(1.02, 1.10, 4),
    "v6e": Checks(1.05, 1.34, 6),
    "tpu7x": Checks(1.23, 1.25, 2),
    "h100": Checks(0.88, 1.34, 5),
}
"""By chip: what benchmarks/plan_vs_published.py prints. On H100 the speed of matrix products was fitted to one of its
runs; a chip with one run is left out."""


@dataclass(frozen=True)
class Interval:
    """Seconds of a step, if it compares with its prediction as published runs on its chip did."""

    least: float
    most: float
    runs: int


def interval(chip: Chip | None, seconds: float) -> Interval | None:
    """The interval of a predicted step; None if no published run on that chip was compared."""
    checks = CHECKS.get(chip.name) if chip else None
    return Interval(checks.least * seconds, checks.most * seconds, checks.runs) if checks else None
