"""Whether more or less of a metric is better: the one rule for which checkpoint is kept as the best, and for what
a report calls the best."""

from collections.abc import Mapping

KNOWN = {"accuracy": True, "dropped": False, "loss": False, "nll": False, "perplexity": False}
"""Of dtrain's own metrics."""


def higher_is_better(metric: str, declared: Mapping[str, bool]) -> bool | None:
    """As the model declares it, or dtrain knows it, by the metric's name without `eval/`; None where nobody does."""
    name = metric.partition("/")[2] or metric
    return declared.get(name, KNOWN.get(name))
