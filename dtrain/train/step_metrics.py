"""The metrics of a step as numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrain.core.errors import NotFinite
from dtrain.core.metrics import SOURCES
from dtrain.train.loss_guard import CAUSES
from dtrain.train.step import NORMS


def norms_of(metrics: Mapping[str, object]) -> dict[str, float]:
    """The norms by name: norm/grad/blocks.out.weight/3 for layer 3 of a stack."""
    named: Any = jax.device_get(metrics.get(NORMS, {}))
    found = {}
    for kind, values in named.items():
        for path, norm in values.items():
            name = f"norm/{kind}/{path}"
            found |= {f"{name}/{i}": float(x) for i, x in enumerate(norm)} if norm.ndim else {name: float(norm)}
    return found


def losses_of_sources(metrics: Mapping[str, object], names: Sequence[str]) -> dict[str, float]:
    """The mean loss of the step's rows of each source of a mixture; none for a source without rows in this step."""
    sums: Any = jax.device_get(metrics.get(SOURCES, np.zeros((2, 0))))
    return {
        f"train/loss/{name}": float(loss / weight)
        for name, loss, weight in zip(names, *sums, strict=False)
        if weight > 0
    }


def finite(step: int, metrics: Mapping[str, object]) -> dict[str, float]:
    """The metrics as numbers. Raises NotFinite if the loss or the gradient norm is not finite."""
    found = jax.device_get({name: value for name, value in metrics.items() if name not in (NORMS, SOURCES)})
    values = {name: float(value) for name, value in found.items()}
    if not values.pop("finite"):
        bad = next((name for name in ("loss", "grad_norm") if not math.isfinite(values[name])), "the loss")
        raise NotFinite(f"{bad} is {values.get(bad, 'not finite')} at step {step}", CAUSES)
    return values
