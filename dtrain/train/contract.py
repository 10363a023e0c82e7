"""Check that the loss of a custom model is a sum over examples, to which an example of weight 0 adds nothing.

A loss that is not such a sum depends on the mesh, the engine and the number of microbatches, and its evaluation is
wrong where the last batch is padded. The check runs the compiled evaluation step four times.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dtrain.core.errors import RecipeError
from dtrain.data.batch import WEIGHT
from dtrain.models.nn.model import Loss

EXACT, ROUNDED = 1e-4, 3e-2
"""Allowed relative difference of sums that are computed in float32, and in bfloat16."""

FIX = "multiply the loss of each example by batch['weight'] if the batch has one, and return the sum of the weights"
WHOLE = "if the loss compares examples or uses statistics of several, put all of those into one row of the batch"
OFF = "; guard.contract: false turns this check off"

Rows = Mapping[str, np.ndarray]


def refuse_broken(evaluate: Callable[[dict[str, np.ndarray]], Loss], rows: Rows, exact: bool) -> None:
    """Raise RecipeError if the loss of these rows, this process's part of a batch, is not a sum over examples.

    For neighbouring rows a and b, the loss of the batches (a, b), (a, a) and (b, b) is computed. For a sum over
    examples, L(a, a) + L(b, b) = 2 L(a, b), on whatever device each pair is.
    """
    count = len(next(iter(rows.values())))
    rows_ab = np.arange(count)
    rows_aa, rows_bb = rows_ab // 2 * 2, np.minimum(rows_ab // 2 * 2 + 1, count - 1)

    def measured(which: np.ndarray, weight: float) -> dict[str, float]:
        batch = {name: values[which] for name, values in rows.items()}
        batch[WEIGHT] = np.full(count, weight, np.float32)
        loss = jax.device_get(jax.block_until_ready(evaluate(batch)))
        sums = {"sum": loss.sum, "weight": loss.weight, **loss.metrics}
        return {name: float(value) for name, value in sums.items()}

    both = measured(rows_ab, 1.0)
    for name, value in both.items():
        if not math.isfinite(value):
            raise RecipeError(
                f"{name} of the loss is {value} for the first held-out examples", f"fix the loss, or the data{OFF}"
            )
    for name, value in measured(rows_ab, 0.0).items():
        if value != 0:
            raise RecipeError(f"examples of weight 0 change the loss: its {name} is {value:.4g}, not 0", FIX + OFF)
    both_a, both_b = measured(rows_aa, 1.0), measured(rows_bb, 1.0)
    tolerance = EXACT if exact else ROUNDED
    for name, value in both.items():
        separate, size = both_a[name] + both_b[name], abs(both_a[name]) + abs(both_b[name])
        if not abs(separate - 2 * value) <= tolerance * max(size, 1e-6):
            message = f"the loss is not a sum over examples: its {name} is {2 * value:.6g} in pairs of different"
            raise RecipeError(f"{message} examples and {separate:.6g} in pairs of equal ones", WHOLE + OFF)


def rows_of(source: Any, local: np.ndarray) -> Rows:
    """Examples for this process's rows of an evaluation batch, repeated if the source has too few."""
    return source.rows(local % len(source))
