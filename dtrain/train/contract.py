"""Whether a custom model's loss keeps its contract: a sum over examples, to which those of weight 0 add nothing.

A loss that does not is another one on every mesh, engine and number of microbatches, and is evaluated wrongly where
the last batch is padded. The compiled evaluation step says so, at the cost of a few of its runs.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dtrain.core.errors import RecipeError
from dtrain.models.nn.model import Loss

EXACT, ROUNDED = 1e-4, 3e-2
"""How far, relatively, sums may be apart where numbers are computed in float32, and in bfloat16."""

WEIGHT = "multiply the loss of each example by batch['weight'], where the batch has one, and return the sum of weights"
WHOLE = "statistics over a batch, or examples compared with each other, need examples of their own in each row"
OFF = "; guard.contract: false trains all the same"

Rows = Mapping[str, np.ndarray]


def refuse_broken(evaluate: Callable[[dict[str, np.ndarray]], Loss], rows: Rows, exact: bool) -> None:
    """RecipeError where the loss of these rows, this process's part of a batch, is no sum over examples.

    Of neighbours a and b in each pair, the batches (a, b), (a, a) and (b, b) are measured: for a sum over examples
    the second and the third together are twice the first, whatever device holds which pair.
    """
    count = len(next(iter(rows.values())))
    place = np.arange(count)
    first, second = place // 2 * 2, np.minimum(place // 2 * 2 + 1, count - 1)

    def measured(which: np.ndarray, weight: float) -> dict[str, float]:
        batch = {name: values[which] for name, values in rows.items()}
        batch["weight"] = np.full(count, weight, np.float32)
        found = jax.device_get(jax.block_until_ready(evaluate(batch)))
        sums = {"sum": found.sum, "weight": found.weight, **found.metrics}
        return {name: float(value) for name, value in sums.items()}

    both = measured(place, 1.0)
    for name, value in both.items():
        if not math.isfinite(value):
            raise RecipeError(
                f"{name} of the loss is {value} for the first held-out examples", f"fix the loss, or the data{OFF}"
            )
    for name, value in measured(place, 0.0).items():
        if value != 0:
            raise RecipeError(f"examples of weight 0 change the loss: its {name} is {value:.4g}, not 0", WEIGHT + OFF)
    firsts, seconds = measured(first, 1.0), measured(second, 1.0)
    room = EXACT if exact else ROUNDED
    for name, value in both.items():
        apart, size = abs(firsts[name] + seconds[name] - 2 * value), abs(firsts[name]) + abs(seconds[name])
        if not apart <= room * max(size, 1e-6):
            message = f"the loss is no sum over examples: its {name} is {2 * value:.6g} for examples together and "
            raise RecipeError(f"{message}{firsts[name] + seconds[name]:.6g} for the same apart", WHOLE + OFF)


def rows_of(source: Any, local: np.ndarray) -> Rows:
    """Examples for this process's rows of an evaluation batch, repeated where there are too few."""
    return source.rows(local % len(source))
