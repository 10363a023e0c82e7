"""The metrics that an evaluation will measure, read from the compiled step before the run starts."""

from collections.abc import Mapping
from typing import Any

import jax

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import higher_is_better


def declared_rising(model: Any) -> dict[str, bool]:
    """The metrics that a model declares in `metrics`, each with whether a higher value is better.

    Raises RecipeError if they are not `Metric` declarations.
    """
    metrics = getattr(model, "metrics", None) or getattr(getattr(model, "model", None), "metrics", ())
    try:
        return {str(metric.name): bool(metric.higher_is_better) for metric in metrics}
    except (AttributeError, TypeError) as error:
        hint = "use dtrain.Metric: metrics = (Metric('top1', higher_is_better=True),)"
        raise RecipeError(f"model: its `metrics` are not a tuple of dtrain.Metric: {error}", hint) from error


def refuse_unmeasured(
    best: str | None, evaluate: jax.stages.Compiled, perplexity: bool, rising: Mapping[str, bool]
) -> None:
    """Raise RecipeError if no evaluation measures `best`, or it is unknown whether higher or lower is better.

    `best`: the recipe's `checkpoint.best`.
    `perplexity`: whether the loss is that of predicting the next token.
    """
    if best is None:
        return
    sums = jax.tree.unflatten(evaluate.out_tree, range(evaluate.out_tree.num_leaves))
    names = {"eval/loss", *(f"eval/{name}" for name in sums.metrics)} | ({"eval/perplexity"} if perplexity else set())
    if best not in names:
        raise RecipeError(f"checkpoint.best: {best} is not measured", f"one of {', '.join(sorted(names))}")
    if higher_is_better(best, rising) is None:
        short = best.partition("/")[2]
        hint = f"declare it in the model with dtrain.Metric: metrics = (Metric({short!r}, higher_is_better=True),)"
        raise RecipeError(f"checkpoint.best: it is not known whether a higher or a lower {best} is better", hint)
