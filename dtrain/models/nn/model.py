"""The contract that every model implements."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

import jax

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import Metric
from dtrain.data.batch import Batch, Example
from dtrain.models.nn.context import Context
from dtrain.models.nn.count_flops import Flops, gradient_flops
from dtrain.models.nn.param import Tree

PROBABILITY, TOKENS, VALUE = "probability", "tokens", "value"
"""Outputs of `Model.predict`: probabilities of classes (examples, classes), the number of predicted tokens."""


class Loss(NamedTuple):
    """Sums over examples; the mean is computed once, after all reductions, as `sum / weight`.

    `statistics` gives parameters declared with `trained=False` their next values, by dotted path: the sum over the
    examples of the value that each example gives, times its weight. A training step stores the mean, `sum / weight`.
    """

    sum: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]
    statistics: dict[str, jax.Array] = {}


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A mixture of experts, as plans ask for it."""

    count: int
    """Experts per layer."""
    active: int
    """Experts that each token is routed to."""
    capacity: float | None = None
    """Most tokens that one expert takes, as a multiple of an even spread; None: no limit."""


FieldValue = str | int | tuple[str, ...]
"""A value of a field that plans may change."""


@dataclass(frozen=True)
class Structure:
    """What plans, searches and checks ask about a model; the defaults hold for a model without such parts."""

    mixture: Mixture | None = None
    layers: int = 0
    """Layers that pipeline stages share out."""
    period: int = 1
    """Layers after which the kinds of layers repeat: a pipeline stage holds whole periods."""
    alternatives: Mapping[str, tuple[FieldValue, ...]] = field(default_factory=dict)
    """Fields that change memory and time but no result: the present value, then those that a search tries."""
    offload: Mapping[str, str] = field(default_factory=dict)
    """Values of fields with which inputs of layers wait in the host's memory for the backward pass."""

    @property
    def offloads(self) -> bool:
        """Whether `offload` is what the model has now."""
        return bool(self.offload) and all(
            self.alternatives.get(name, ("",))[0] == value for name, value in self.offload.items()
        )


class Model(Protocol):
    """A frozen dataclass: the recipe's `model` section itself."""

    @property
    def exact_inputs(self) -> tuple[str, ...]:
        """Arrays of a batch that keep their dtype where others are cast to the compute dtype; labels always do."""
        ...

    def params(self) -> Tree:
        """The declared parameters: any pytree with a `Param` at each leaf."""
        ...

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        """The loss of a batch, as sums. Metrics are divided by the same weight as the loss."""
        ...

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        """The cost of one training step on `examples` such examples.

        `example`: as the model receives it, prepared. `declared`: the parameters, as the recipe trains them; gradients
        of frozen ones are not computed.
        """
        ...

    def mismatch(self, example: Example) -> str:
        """Why the model cannot take such examples, with the model's and the data's numbers; empty if it can."""
        ...

    def predict(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        """What the model outputs for each example: arrays (examples, ...), split over the mesh like the examples.

        PROBABILITY holds the probabilities of classes (examples, classes), VALUE numbers (examples, ...); NLL and
        TOKENS hold sums over the tokens of a row (examples,).
        """
        ...

    def sample(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        """What the model draws for each example, with `ctx.keys`, for `evaluate.samples`: arrays (examples, ...)."""
        ...


class Declared:
    """What a model declares beyond the contract; these defaults hold where it declares nothing."""

    @property
    def user_code(self) -> str:
        """What the recipe names as code that runs when the model is built; empty for dtrain's own models."""
        return ""

    @property
    def needs_keys(self) -> bool:
        """Whether its loss may ask for random keys, so that every batch has the numbers of its rows."""
        return bool(self.user_code)

    @property
    def generates(self) -> bool:
        """Whether it generates text, token by token."""
        return False

    @property
    def beside_loss(self) -> str:
        """The setting whose loss only the model's own objective has; empty: none."""
        return ""

    @property
    def namings(self) -> tuple[Any, ...]:
        """A `Naming` for each way in which published files name its parameters; the first is the usual one."""
        return ()

    @property
    def fixed_size(self) -> bool:
        """Whether its parameters fit inputs of one size only."""
        return True

    @property
    def needs_init(self) -> str:
        """Why a new run of it cannot start from random parameters; empty if it can."""
        return ""

    @property
    def exact_inputs(self) -> tuple[str, ...]:
        """Arrays of a batch that keep their dtype where others are cast to the compute dtype; labels always do."""
        return ()

    def adapted_flops(self, example: Example, examples: int, adapted: "Model", declared: Tree) -> Flops:
        """The cost of one training step of `adapted`, this model with low-rank adapters; `declared`: its parameters."""
        return gradient_flops(adapted, example, examples, declared)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics that its loss returns, and what is computed from them."""
        return ()

    @property
    def split_rows(self) -> bool:
        """Whether it accepts rows split along their length, in the order of `ctx.places`."""
        return True

    @property
    def structure(self) -> Structure:
        """What plans, searches and checks ask about it."""
        return Structure()

    @property
    def predicts(self) -> bool:
        """Whether it defines `predict`."""
        return type(self).predict is not Declared.predict

    @property
    def samples(self) -> bool:
        """Whether it defines what it draws, or predicts."""
        return self.predicts

    def predict(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        """What it outputs for each example. RecipeError if it defines no outputs."""
        raise RecipeError("the model defines no predictions", "give its class a method predict(params, batch, ctx)")

    def sample(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        """What it draws for each example, such as pictures, by name (examples, ...); by default its predictions."""
        return self.predict(params, batch, ctx)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Keys of sizes that the recipe leaves out, so that they are those of the data: `sized` fills them in."""
        return ()

    def sized(self, example: Example) -> Self:
        """The same model, with the sizes that the recipe leaves out taken from the training examples, as the data
        declares them. What they do not show stays left out, and `mismatch` says why."""
        del example
        return self

    def for_example(self, example: Mapping[str, jax.ShapeDtypeStruct]) -> Self:
        """The same model for batches of such arrays, given with one example each, as its loss receives them."""
        return self

    def overrides(self, fields: Mapping[str, FieldValue]) -> dict[str, Any]:
        """The keys of the recipe's `model` section that set these fields."""
        return dict(fields)

    def replaced(self, fields: Mapping[str, FieldValue]) -> Self:
        """The same model with other values of these fields."""
        return replace(self, **self.overrides(fields))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Wrapped(Declared):
    """A model around another one, made for the examples already. What it declares is that of the inner one; `predict`,
    `overrides` and `replaced` are not passed on."""

    model: Any
    """The inner one: a model with what `Declared` adds to the contract."""

    @property
    def user_code(self) -> str:
        return self.model.user_code

    @property
    def needs_keys(self) -> bool:
        return self.model.needs_keys

    @property
    def exact_inputs(self) -> tuple[str, ...]:
        return self.model.exact_inputs

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return self.model.metrics

    @property
    def split_rows(self) -> bool:
        return self.model.split_rows

    @property
    def structure(self) -> Structure:
        return self.model.structure

    @property
    def generates(self) -> bool:
        return self.model.generates

    @property
    def predicts(self) -> bool:
        return super().predicts and self.model.predicts

    def mismatch(self, example: Example) -> str:
        """Why the inner model cannot take such examples; empty if it can."""
        return self.model.mismatch(example)
