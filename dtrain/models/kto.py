"""Preference tuning by answers that were judged one by one: KTO (Ethayarajh et al. 2024)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from dtrain.core.errors import Problem
from dtrain.core.types import Answers, PositiveFloat
from dtrain.data.batch import DOCUMENT, TARGET, WEIGHT, Batch
from dtrain.models.dpo import AgainstBase, PreferenceModel
from dtrain.models.lora import Adapted
from dtrain.models.nn.context import Context
from dtrain.models.nn.model import Loss
from dtrain.models.nn.param import Tree

GOOD, BAD = (0, 1), (2, 3)
"""The documents of a row: the answer, and its prompt with another answer."""


@dataclass(frozen=True, kw_only=True)
class KTO(AgainstBase):
    """Make good answers more probable than bad ones: weight x (1 - sigmoid(beta x by how much more the model than the
    base prefers an answer to what it prefers on average)), the difference the other way for bad answers (equations 7
    and 8). The average is over the batch, of prompts with answers to others, and at least zero."""

    answers: ClassVar[Answers] = "judged"
    kind: Literal["kto"] = "kto"
    beta: PositiveFloat = 0.1
    """How strongly the model is kept near the base."""
    good: PositiveFloat = 1.0
    """Weight of good answers: where these are few, raise it (equation 8: good x their number within 1 to 4/3 of bad x
    theirs)."""
    bad: PositiveFloat = 1.0
    """Weight of bad answers."""

    def problems(self, recipe: Any) -> Iterator[Problem]:
        yield from super().problems(recipe)
        if recipe.accumulate > 1 and recipe.mesh.pipeline == 1:
            message = "kto compares each answer with the average of its batch, of which a microbatch has a part"
            yield "accumulate", message, "leave accumulate out, with a smaller batch if memory is short"

    def losses(
        self, ratio_B: jax.Array, other_B: jax.Array, good_B: jax.Array, weight_B: jax.Array, ctx: Context
    ) -> tuple[jax.Array, jax.Array]:
        """The loss of each answer, and by how much its reward is on the right side; both (B,).

        `ratio_B`, `other_B`: log(pi / base) of the answer, and of the answer to another prompt.
        """
        count = ctx.sum_over_examples(weight_B.sum())
        average = ctx.sum_over_examples((jax.lax.stop_gradient(other_B) * weight_B).sum()) / jnp.maximum(count, 1)
        margin_B = self.beta * (ratio_B - jnp.maximum(average, 0)) * jnp.where(good_B, 1, -1)
        return jnp.where(good_B, self.good, self.bad) * jax.nn.sigmoid(-margin_B), margin_B

    def tuned(self, model: Adapted) -> "JudgedModel":
        return JudgedModel(model, self)


@dataclass(frozen=True)
class JudgedModel(PreferenceModel):
    """A decoder with adapters, trained on rows with one judged answer."""

    objective: KTO

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        ratios = self.ratios(params, batch, ctx, len(GOOD + BAD))  # zero for documents that a row does not have
        ratio_B, other_B = (ratios[one] + ratios[two] for one, two in zip(GOOD, BAD, strict=True))
        own_BT = (batch[TARGET] >= 0) & (batch[DOCUMENT] == GOOD[0])
        good_B = ctx.reduce(own_BT.sum(1, dtype=jnp.float32), "length") > 0
        weight_B = batch[WEIGHT] if WEIGHT in batch else jnp.ones_like(ratio_B)
        return self.summed(*self.objective.losses(ratio_B, other_B, good_B, weight_B, ctx), batch)
