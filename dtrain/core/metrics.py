"""Whether a higher or lower value of a metric is better, for retention of the best checkpoint and for reports."""

from collections.abc import Mapping

KNOWN = {"accuracy": True, "dropped": False, "loss": False, "nll": False, "perplexity": False}
"""Whether higher is better, for dtrain's own metrics."""


def higher_is_better(metric: str, declared: Mapping[str, bool]) -> bool | None:
    """Look up a metric, without its prefix `eval/`, in what the model declares and then in KNOWN; None if unknown."""
    name = metric.partition("/")[2] or metric
    return declared.get(name, KNOWN.get(name))
