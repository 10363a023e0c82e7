"""What a run minimises: the contract of objectives, and the model's own loss, which is the default."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from dtrain.core.errors import Problem
from dtrain.core.metrics import Metric
from dtrain.core.types import Answers
from dtrain.core.weights_source import WeightsSource
from dtrain.models.lora import Lora, adapted
from dtrain.models.nn.param import Tree


class Taken(NamedTuple):
    """Answers that objectives compare: what they are called, the data that has them, and an objective for them."""

    text: str
    data: str
    objective: str


OF_ANSWERS: Mapping[Answers, Taken] = {
    "pairs": Taken("pairs of answers", "data: {kind: preference}", "objective: {kind: dpo}"),
    "judged": Taken("judged answers", "data: {kind: feedback}", "objective: {kind: kto}"),
}


class Objective(ABC):
    """A recipe's `objective` section. It wraps the model, so that no objective is trained as another one."""

    kind: Any
    """Its name in recipes."""
    answers: ClassVar[Answers] = ""
    """What it takes rows of: pairs of answers, or judged ones; nothing of the kind."""
    measures_nll: ClassVar[bool] = False
    """Whether evaluations of texts measure the negative log-likelihood of the next token: as the metric `nll`, or where
    there is none as the loss. Perplexity and bits per byte are computed from it."""

    @abstractmethod
    def wrap(self, model: Any, lora: Lora | None, frozen: Mapping[str, Any]) -> Any:
        """The model as it is trained.

        `frozen`: for each of `sources`, the model whose parameters come from there. RecipeError if they do not fit.
        """

    def sources(self) -> Mapping[str, WeightsSource]:
        """Where parameters come from that are neither trained nor saved, by their place in the tree of parameters.

        After the training they are not needed: the model is the recipe's own.
        """
        return {}

    def own(self, params: Tree) -> Tree:
        """The parameters without those of `sources`."""
        parts = self.sources()
        return {name: value for name, value in params.items() if name not in parts} if parts else params

    def problems(self, recipe: Any) -> Iterator[Problem]:
        """What of a recipe does not go with it."""
        found, needed = recipe.data.answers, self.answers
        if (setting := recipe.model.beside_loss) and not self.measures_nll:
            message = f"{self.kind} does not train what model.{setting} adds to the model"
            yield "objective", message, f"leave model.{setting} out"
        if found and not needed:
            objective = OF_ANSWERS[found].objective
            yield "objective", f"data of kind {recipe.data.kind} has {OF_ANSWERS[found].text}", objective
        elif found != needed:
            message = f"{self.kind} needs {OF_ANSWERS[needed].text}; the data is of kind {recipe.data.kind}"
            yield "objective", message, OF_ANSWERS[needed].data

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What its loss measures beside the metrics of the model."""
        return ()

    @property
    def packages(self) -> tuple[str, ...]:
        """The optional packages that it needs; see `core.extras`."""
        return tuple(package for origin in self.sources().values() for package in origin.packages)


@dataclass(frozen=True)
class OwnLoss(Objective):
    """The loss of the model itself: of the next token, of classes, of numbers, or a user's own."""

    kind: str = "own"
    measures_nll: ClassVar[bool] = True

    def wrap(self, model: Any, lora: Lora | None, frozen: Mapping[str, Any]) -> Any:
        del frozen
        return adapted(model, lora)


def minimised(recipe: Any) -> Objective:
    """The objective of a recipe or of its sections: by default the model's own loss."""
    return recipe.objective or OwnLoss()


def needs_decoder(objective: Objective, recipe: Any) -> Iterator[Problem]:
    """A problem if the model of a recipe is not one that generates text."""
    if not recipe.model.generates:
        yield "objective", f"{objective.kind} needs a decoder; the model is of kind {recipe.model.kind}", ""
