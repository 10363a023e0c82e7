"""Whether an evaluation will measure the metric of the best checkpoint, read from the compiled step."""

from collections.abc import Iterable

import jax

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import Metric, higher_is_better


def refuse_unmeasured(
    best: str | None,
    evaluate: jax.stages.Compiled,
    bytes_per_token: float | None,
    declared: Iterable[Metric],
    scores: Iterable[str] = (),
) -> None:
    """Raise RecipeError if no evaluation measures `best`, or it is unknown whether higher or lower is better.

    `best`: the recipe's `checkpoint.best`.
    `bytes_per_token`: as in `hooks.evaluated`. `scores`: those of the recipe's questions.
    """
    if best is None:
        return
    sums = jax.tree.unflatten(evaluate.out_tree, range(evaluate.out_tree.num_leaves))
    names = {"eval/loss", *(f"eval/{name}" for name in sums.metrics)}
    names |= {"eval/perplexity"} if bytes_per_token is not None else set()
    names |= {"eval/bits_per_byte"} if bytes_per_token else set()
    names |= {f"eval/{name}" for name in scores}
    if best not in names:
        raise RecipeError(f"checkpoint.best: {best} is not measured", f"one of {', '.join(sorted(names))}")
    if higher_is_better(best, declared) is None:
        short = best.partition("/")[2]
        hint = f"declare it in the model with dtrain.Metric: metrics = (Metric({short!r}, higher_is_better=True),)"
        raise RecipeError(f"checkpoint.best: it is not known whether a higher or a lower {best} is better", hint)
