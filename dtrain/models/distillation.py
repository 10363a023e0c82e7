"""Distillation of a decoder from the distribution of a frozen teacher's next token (Hinton et al. 2015)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax

from dtrain.core.errors import Problem, RecipeError
from dtrain.core.metrics import NLL, Metric
from dtrain.core.types import Fraction, PositiveFloat
from dtrain.core.weights_source import WeightsSource
from dtrain.data.batch import Batch, Example
from dtrain.models.decoder import Decoder
from dtrain.models.next_token import Known
from dtrain.models.nn.context import Context
from dtrain.models.nn.model import Flops, Loss, Wrapped
from dtrain.models.nn.param import Tree
from dtrain.models.objective import Objective, needs_decoder

TEACHER = "teacher"
"""Where the teacher's parameters are in the tree, beside the model's own."""


@dataclass(frozen=True, kw_only=True)
class Distillation(Objective):
    """Learn the distribution of a larger, frozen decoder: share x T^2 x KL(teacher || model) + (1 - share) x the
    cross-entropy of the data, with the logits of both divided by T in the first term."""

    kind: Literal["distillation"] = "distillation"
    teacher: WeightsSource
    """A decoder with the same vocabulary."""
    temperature: PositiveFloat = 1.0
    """T: a higher one gives unlikely tokens more weight."""
    share: Fraction = 0.5
    """Weight of the teacher's distribution; the rest is that of the data's tokens."""

    measures_nll: ClassVar[bool] = True

    def wrap(self, model: Decoder, lora: Any, frozen: Mapping[str, Any]) -> "DistilledModel":
        del lora
        teacher: Decoder = frozen[TEACHER]
        if (teacher.vocab, teacher.padded_vocab) != (model.vocab, model.padded_vocab):
            message = f"the teacher has vocab {teacher.vocab} ({teacher.padded_vocab} rows), the model {model.vocab}"
            hint = f"model.vocab={teacher.vocab} model.pad_vocab={teacher.pad_vocab}, and the teacher's tokenizer"
            raise RecipeError(f"objective.teacher: {message} ({model.padded_vocab} rows)", hint)
        return DistilledModel(model, teacher, self)

    def sources(self) -> Mapping[str, WeightsSource]:
        return {TEACHER: self.teacher}

    def problems(self, recipe: Any) -> Iterator[Problem]:
        yield from super().problems(recipe)
        yield from needs_decoder(self, recipe)
        if recipe.lora:
            yield "lora", "distillation trains all parameters of the model", "leave lora out"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (NLL,)


@dataclass(frozen=True)
class DistilledModel(Wrapped):
    """A decoder that learns from a teacher while it trains; evaluated and used, it is the decoder alone."""

    model: Decoder
    teacher: Decoder
    distillation: Distillation

    def params(self) -> Tree:
        """The model's own tree, with the teacher's parameters under "teacher": not trained and not saved."""
        frozen = jax.tree.map(lambda param: replace(param, trained=False, saved=False), self.teacher.params())
        return {**self.model.params(), TEACHER: frozen}

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        own, how = self.distillation.own(params), self.distillation
        if not ctx.train:
            loss = self.model.loss(own, batch, ctx)
            return loss._replace(metrics={NLL.name: loss.sum, **loss.metrics})
        frozen = jax.tree.map(jax.lax.stop_gradient, params[TEACHER])

        def taught(nll: jax.Array, x_BTE: jax.Array, weight_BT: jax.Array) -> jax.Array:
            teacher_BTE, _ = self.teacher.activations(frozen, batch, weight_BT, ctx)
            known = Known(self.teacher.head, teacher_BTE, self.teacher.unembedding(frozen))
            matrix = self.model.unembedding(own)
            divergence = self.model.head.divergence(x_BTE, matrix, known, weight_BT, ctx, how.temperature)
            return how.share * how.temperature**2 * divergence + (1 - how.share) * nll

        return self.model.loss_with(own, batch, ctx, taught)

    def predict(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        return self.model.predict(self.distillation.own(params), batch, ctx)

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        step, convention = self.model.flops(example, examples, self.distillation.own(declared))
        teacher = self.teacher.flops(example, examples, self.teacher.params()).step
        forward = teacher / 3  # two thirds are the backward pass
        return Flops(step + forward, f"{convention}, and the forward pass of the teacher")

    def mismatch(self, example: Example) -> str:
        unfit = self.teacher.mismatch(example)
        return super().mismatch(example) or (f"objective.teacher: {unfit}" if unfit else "")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(dict.fromkeys((*self.distillation.metrics, *self.model.metrics)))
