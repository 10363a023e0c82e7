"""Metrics: each is declared once, with its unit and whether a higher value is better."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dtrain.core.types import JsonObject, NonNegative, Positive

PERCENT = "%"
"""Unit of a share: the value is a fraction of one and is shown in per cent."""


class Metric(NamedTuple):
    """A metric. A model declares those that its loss returns in `metrics`, so that the best checkpoint can be kept."""

    name: str
    higher_is_better: bool | None
    """None: neither is, or it depends."""
    unit: str = ""
    """"%" for a fraction of one, shown in per cent; else printed after the value; "" for a plain number."""

    def text(self, value: float) -> str:
        """The value with its unit."""
        return f"{value:.2%}" if self.unit == PERCENT else f"{value:.4f}{f' {self.unit}' if self.unit else ''}"


LOSS = Metric("loss", higher_is_better=False)
ACCURACY = Metric("accuracy", higher_is_better=True, unit=PERCENT)
NLL = Metric("nll", higher_is_better=False)
PERPLEXITY = Metric("perplexity", higher_is_better=False)
BITS_PER_BYTE = Metric("bits_per_byte", higher_is_better=False)
MAE = Metric("mae", higher_is_better=False)
DROPPED = Metric("dropped", higher_is_better=False, unit=PERCENT)
EXACT_MATCH = Metric("exact_match", higher_is_better=True, unit=PERCENT)
CHOICE = Metric("choice_accuracy", higher_is_better=True, unit=PERCENT)
REWARD_ACCURACY = Metric("reward_accuracy", higher_is_better=True, unit=PERCENT)
REWARD_MARGIN = Metric("reward_margin", higher_is_better=True)
SOURCES = "sources"
"""Sums for each source of a mixture (2, sources), beside the metrics: of the cross-entropy, and of the weights."""
SCORES = (EXACT_MATCH, CHOICE)
MODELS = (LOSS, ACCURACY, NLL, PERPLEXITY, BITS_PER_BYTE, MAE, DROPPED, *SCORES, REWARD_ACCURACY, REWARD_MARGIN)
"""What dtrain's own models return, what is computed from it, and scores of questions."""


def known(name: str, declared: Iterable[Metric]) -> Metric | None:
    """The metric of that name, its prefix `eval/` or `train/` left out, among those declared and then in MODELS."""
    short = name.partition("/")[2] or name
    return next((metric for metric in (*declared, *MODELS) if metric.name == short), None)


def higher_is_better(name: str, declared: Iterable[Metric]) -> bool | None:
    """Whether a higher value of that metric is better; None if it is unknown."""
    metric = known(name, declared)
    return metric.higher_is_better if metric else None


def plain(metrics: Iterable[Metric]) -> dict[str, JsonObject]:
    """The keys of run.json that hold declared metrics."""
    metrics = list(metrics)
    rising = {metric.name: metric.higher_is_better for metric in metrics if metric.higher_is_better is not None}
    return {"higher_is_better": rising, "units": {metric.name: metric.unit for metric in metrics if metric.unit}}


def recorded(record: JsonObject) -> tuple[Metric, ...]:
    """The metrics that the run with this run.json declared."""
    rising, units = record.get("higher_is_better", {}), record.get("units", {})
    return tuple(Metric(name, rising.get(name), units.get(name, "")) for name in {**rising, **units})


@dataclass(frozen=True, kw_only=True)
class Watch:
    """A metric of the evaluation, and when it counts as no longer improving."""

    metric: str = "eval/loss"
    """It must be one whose better direction is known."""
    patience: Positive = 5
    """Evaluations in a row without an improvement."""
    min_delta: NonNegative = 0.0
    """An improvement is better than the best value before by more than this."""
