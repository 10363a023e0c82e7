"""Preference tuning of a decoder without a reference model: ORPO (Hong et al. 2024) and SimPO (Meng et al. 2024).

Both compare the mean log-probabilities of the tokens of two answers, and train all parameters or adapters.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dtrain.core.errors import Problem
from dtrain.core.types import NonNegative, PositiveFloat
from dtrain.data.batch import DOCUMENT, TARGET, Batch, Example
from dtrain.models.lora import Adapted, Lora, adapted
from dtrain.models.nn.context import Context
from dtrain.models.nn.model import Flops, Loss
from dtrain.models.nn.param import Tree
from dtrain.models.pairs import PairModel, PairObjective

CERTAIN = -1e-6
"""The highest mean log-probability whose odds are computed: those of an answer that is certain are infinite."""


@dataclass(frozen=True, kw_only=True)
class ReferenceFree(PairObjective):
    """A loss of the mean log-probabilities of a preferred answer and another one."""

    @abstractmethod
    def losses(self, chosen_B: jax.Array, rejected_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The loss of each pair, and by how much the reward of the preferred answer is higher; both (B,)."""

    def wrap(self, model: Any, lora: Lora | None, frozen: Mapping[str, Any]) -> "ReferenceFreeModel":
        del frozen
        return ReferenceFreeModel(adapted(model, lora), self)

    def problems(self, recipe: Any) -> Iterator[Problem]:
        yield from super().problems(recipe)
        if getattr(recipe.model, "z_loss", 0):
            yield "model.z_loss", f"{self.kind} leaves it out", "leave z_loss out"
        if recipe.model.structure.mixture and not recipe.lora:
            yield "objective", f"{self.kind} leaves out the losses that balance the experts", "add lora and init"


@dataclass(frozen=True, kw_only=True)
class ORPO(ReferenceFree):
    """Learn the preferred answer, and raise its odds over those of the other one: its cross-entropy per token, and
    -beta x log sigmoid of the logarithm of the ratio of odds (Hong et al. 2024, equations 6 and 7)."""

    kind: Literal["orpo"] = "orpo"
    beta: PositiveFloat = 0.1
    """Weight of the ratio of odds."""

    def losses(self, chosen_B: jax.Array, rejected_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        ratio_B = _log_odds(chosen_B) - _log_odds(rejected_B)
        return -chosen_B - self.beta * jax.nn.log_sigmoid(ratio_B), self.beta * (chosen_B - rejected_B)


@dataclass(frozen=True, kw_only=True)
class SimPO(ReferenceFree):
    """Prefer one of two answers by a margin: -log sigmoid(beta x the difference of their log-probabilities per token -
    margin) (Meng et al. 2024, equation 6)."""

    kind: Literal["simpo"] = "simpo"
    beta: PositiveFloat = 2.0
    """Factor of the log-probabilities."""
    margin: NonNegative = 1.0
    """By how much the reward of the preferred answer is to be higher."""

    def losses(self, chosen_B: jax.Array, rejected_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        above_B = self.beta * (chosen_B - rejected_B)
        return -jax.nn.log_sigmoid(above_B - self.margin), above_B


def _log_odds(mean_B: jax.Array) -> jax.Array:
    """log(p / (1 - p)) of the probability p whose logarithm is given."""
    mean_B = jnp.minimum(mean_B, CERTAIN)
    return mean_B - jnp.log(-jnp.expm1(mean_B))


@dataclass(frozen=True)
class ReferenceFreeModel(PairModel):
    """A decoder, with adapters or without, trained on pairs of answers."""

    objective: ReferenceFree

    def params(self) -> Tree:
        return self.model.params()

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        lora = isinstance(self.model, Adapted)
        decoder, own = (self.model.model, self.model.combined(params)) if lora else (self.model, params)
        sums = decoder.document_losses(own, batch, ctx, 2)
        tokens = [(batch[TARGET] >= 0) & (batch[DOCUMENT] == answer) for answer in range(2)]
        counts = [ctx.reduce(one_BT.sum(1, dtype=jnp.float32), "length") for one_BT in tokens]
        chosen_B, rejected_B = (-sum_B / jnp.maximum(count_B, 1) for sum_B, count_B in zip(sums, counts, strict=True))
        return self.summed(*self.objective.losses(chosen_B, rejected_B), batch)

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        return self.model.flops(example, examples, declared)
