"""Every objective wraps the model itself, says what it needs, and none is trained as another one."""

import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from dtrain.core.metrics import Metric
from dtrain.core.weights_source import WeightsSource
from dtrain.inference.evaluate import text_bytes
from dtrain.models.decoder import Decoder
from dtrain.models.nn.model import Wrapped
from dtrain.models.objective import Objective, OwnLoss
from dtrain.recipe import recipe
from dtrain.recipe.crosscheck import problems_of
from dtrain.recipe.load import load
from dtrain.track.console import Console
from dtrain.train import run as run_module

MEMBERS = (OwnLoss, *typing.get_args(recipe.Objective))
GIVEN: dict[str, Any] = {"teacher": WeightsSource(weights="none")}
"""Fields of members that have no default."""


def made(member: Any) -> Any:
    needed = [name for name, of in member.__dataclass_fields__.items() if name in GIVEN]
    return member(**{name: GIVEN[name] for name in needed})


@dataclass(frozen=True, kw_only=True)
class Unfinished(Objective):
    """An objective whose author forgot to wrap the model."""

    kind: Literal["unfinished"] = "unfinished"


@dataclass(frozen=True, kw_only=True)
class Another(Objective):
    """An objective that wraps the model and declares nothing about its loss."""

    kind: Literal["another"] = "another"

    def wrap(self, model: Any, lora: Any, frozen: Any) -> Any:
        return Wrapped(model)


def test_an_objective_that_does_not_wrap_the_model_is_not_made() -> None:
    with pytest.raises(TypeError, match=r"abstract method '?wrap"):
        Unfinished()  # pyright: ignore[reportAbstractUsage]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.__name__)
def test_a_member_fulfils_the_contract(member: Any) -> None:
    objective = made(member)
    assert isinstance(objective, Objective)
    assert member.wrap is not Objective.wrap
    parts = objective.sources()
    params = {"own": 1} | dict.fromkeys(parts, 2)
    assert objective.own(params) == {"own": 1}
    assert all(isinstance(origin, WeightsSource) and hasattr(objective, part) for part, origin in parts.items())
    assert set(objective.packages) >= {package for origin in parts.values() for package in origin.packages}


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.__name__)
def test_a_member_refuses_what_it_cannot_train(member: Any) -> None:
    classifier = load("mlp-digits")
    object.__setattr__(classifier, "objective", made(member))
    refused = [key for key, _, _ in problems_of(classifier, None) if key == "objective"]
    assert bool(refused) == (member is not OwnLoss)


def test_pairs_are_refused_by_each_objective_that_does_not_take_them() -> None:
    class Pairs:
        kind, answers = "preference", "pairs"

    class Some:
        accumulate, data, model, lora = (
            1,
            Pairs(),
            Decoder(vocab=8, context=8, layers=1, width=8, heads=1, hidden=8),
            None,
        )

    for member in MEMBERS:
        problems = [
            message for _, message, _ in made(member).problems(Some()) if "pairs" in message or "judged" in message
        ]
        assert bool(problems) != (member.answers == "pairs")


def test_perplexity_is_computed_only_of_a_loss_of_texts() -> None:
    source = load("decoder-tiny").data.open("test")
    recipe_of = load("decoder-tiny")
    assert text_bytes(recipe_of, source) == source.bytes_per_token == 1
    object.__setattr__(recipe_of, "objective", Another())
    assert text_bytes(recipe_of, source) is None


@dataclass(frozen=True, kw_only=True)
class Margin(OwnLoss):
    """The model's own loss, with a metric that the model does not declare."""

    shown: ClassVar[tuple[Metric, ...]] = (Metric("margin", higher_is_better=True),)

    def wrap(self, model: Any, lora: Any, frozen: Any) -> Any:
        return WithMargin(model)


@dataclass(frozen=True)
class WithMargin(Wrapped):
    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (*self.model.metrics, *Margin.shown)

    def params(self) -> Any:
        return self.model.params()

    def loss(self, params: Any, batch: Any, ctx: Any) -> Any:
        loss = self.model.loss(params, batch, ctx)
        return loss._replace(metrics={**loss.metrics, "margin": loss.sum})

    def flops(self, example: Any, examples: int, declared: Any) -> Any:
        return self.model.flops(example, examples, declared)


@pytest.mark.slow
def test_the_best_step_is_kept_by_a_metric_of_the_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("mlp-digits", ["steps=6", "optimizer.schedule=constant", "checkpoint.every=2", "evaluate.every=2"])
    object.__setattr__(model, "objective", Margin())
    object.__setattr__(model.checkpoint, "best", "eval/margin")
    monkeypatch.setattr(run_module, "refuse_conflicts", lambda _: None)  # the section's check knows the recipe's alone
    place = run_module.run(model, tmp_path, Console(silent=True))
    assert place is not None
    assert place.read_record()["higher_is_better"]["margin"] is True
