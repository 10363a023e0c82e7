"""What the objectives that compare answers share: what they take, measure and refuse."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dtrain.core.errors import Problem
from dtrain.core.metrics import REWARD_ACCURACY, REWARD_MARGIN, Metric
from dtrain.core.types import Answers
from dtrain.data.batch import DOCUMENT, WEIGHT, Batch, Example
from dtrain.models.nn.model import Loss, Wrapped
from dtrain.models.objective import OF_ANSWERS, Objective, needs_decoder


@dataclass(frozen=True, kw_only=True)
class PairObjective(Objective):
    """Prefers some answers to others; of two to one prompt, unless it says otherwise."""

    answers: ClassVar[Answers] = "pairs"

    def problems(self, recipe: Any) -> Iterator[Problem]:
        yield from super().problems(recipe)
        yield from needs_decoder(self, recipe)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (REWARD_ACCURACY, REWARD_MARGIN)


@dataclass(frozen=True)
class PairModel(Wrapped):
    """A decoder that is trained on rows with two answers: of pairs the preferred one is document 0, the other 1."""

    model: Any
    objective: PairObjective

    def summed(self, loss_B: jax.Array, margin_B: jax.Array, batch: Batch) -> Loss:
        """The loss of the pairs, and their metrics; the margin: by how much the preferred answer's reward is higher."""
        weight_B = batch[WEIGHT] if WEIGHT in batch else jnp.ones_like(margin_B)
        metrics = {REWARD_ACCURACY.name: (margin_B > 0).astype(jnp.float32), REWARD_MARGIN.name: margin_B}
        sums = {name: (value_B * weight_B).sum() for name, value_B in metrics.items()}
        return Loss((loss_B * weight_B).sum(), weight_B.sum(), sums)

    def mismatch(self, example: Example) -> str:
        if DOCUMENT not in example:
            taken = OF_ANSWERS[self.objective.answers]
            return f"objective {self.objective.kind} takes {taken.text}: {taken.data}"
        return super().mismatch(example)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return self.objective.metrics

    @property
    def split_rows(self) -> bool:
        return False
