"""Direct preference optimisation of a decoder with adapters (Rafailov et al. 2023); the reference is the frozen base.

The base has no adapters, so that the reference costs a second forward pass and no second copy of the parameters.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from dtrain.core.errors import Problem, RecipeError
from dtrain.core.types import PositiveFloat
from dtrain.data.batch import Batch, Example
from dtrain.models.lora import BASE, Adapted, Lora
from dtrain.models.nn.context import Context
from dtrain.models.nn.model import Flops, Loss
from dtrain.models.nn.param import Tree, paths
from dtrain.models.pairs import PairModel, PairObjective

NEEDS_BASE = "compares the model with its frozen base, and so needs lora"
ADD_LORA = "add lora and init; to train all parameters, set a high rank"
FULL = "leave lora.train out; adapters of a high rank can learn as much"


@dataclass(frozen=True, kw_only=True)
class AgainstBase(PairObjective):
    """Compares a decoder that has adapters with the same without them."""

    def wrap(self, model: Any, lora: Lora | None, frozen: Mapping[str, Any]) -> "PreferenceModel":
        del frozen
        if lora is None:
            raise RecipeError(f"objective: {self.kind} {NEEDS_BASE}", ADD_LORA)
        return self.tuned(Adapted(model, lora))

    @abstractmethod
    def tuned(self, model: Adapted) -> "PreferenceModel":
        """The model as it is trained."""

    def problems(self, recipe: Any) -> Iterator[Problem]:
        yield from super().problems(recipe)
        if recipe.lora and recipe.lora.train:
            why = f"{self.kind} compares the model with its frozen base, and these parameters would move"
            yield "lora.train", why, FULL
        if not recipe.lora:
            yield "objective", f"{self.kind} {NEEDS_BASE}", ADD_LORA


@dataclass(frozen=True, kw_only=True)
class DPO(AgainstBase):
    """Prefer one of two answers: -log sigmoid(beta x by how much more the model prefers it than the base does)."""

    kind: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """How strongly the model is kept near the base."""

    def tuned(self, model: Adapted) -> "PreferenceModel":
        return PreferenceModel(model, self)


@dataclass(frozen=True)
class PreferenceModel(PairModel):
    """A decoder with adapters, trained on rows with a preferred answer and another one."""

    model: Adapted
    objective: Any

    def params(self) -> Tree:
        """Those of the adapted decoder. RecipeError if one of the base is trained: the reference would move with it."""
        declared = self.model.params()
        base = jax.tree.leaves(paths(declared[BASE])), jax.tree.leaves(declared[BASE])
        if moving := next((name for name, param in zip(*base, strict=True) if param.trained), ""):
            kind = self.objective.kind
            raise RecipeError(
                f"lora.train: {kind} compares the model with its frozen base, and {moving} is trained", FULL
            )
        return declared

    def ratios(self, params: Tree, batch: Batch, ctx: Context, documents: int) -> tuple[jax.Array, ...]:
        """log(pi / base) (B,) of each of the first documents of the rows."""
        decoder = self.model.model
        policy = decoder.document_losses(self.model.combined(params), batch, ctx, documents)
        reference = decoder.document_losses(self.model.frozen(params), batch, ctx, documents)
        # the losses are negative log-probabilities: pi - ref of an answer is ref's loss less pi's
        return tuple(ref_B - own_B for own_B, ref_B in zip(policy, reference, strict=True))

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        chosen_B, rejected_B = self.ratios(params, batch, ctx, 2)
        margin_B = self.objective.beta * (chosen_B - rejected_B)
        return self.summed(-jax.nn.log_sigmoid(margin_B), margin_B, batch)

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        step, convention = self.model.flops(example, examples, declared)
        base = self.model.model
        forward = base.flops(example, examples, base.params()).step / 3  # two thirds are the backward pass
        return Flops(step + forward, f"{convention}, and the forward pass of the base")
