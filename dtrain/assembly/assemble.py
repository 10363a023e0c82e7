"""Assemble mesh, model, data, optimizer and step from a recipe, with abstract arrays: nothing is executed."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dtrain.assembly import state as states
from dtrain.assembly.state import State
from dtrain.assembly.step import eval_step, loss_of, loss_step, outputs_of, predict_step, several_steps, train_step
from dtrain.assembly.trace_checks import refuse_few_classes, refuse_ignored_labels
from dtrain.core.chips import Chip, chip_of
from dtrain.core.errors import DataError, RecipeError
from dtrain.core.types import Device
from dtrain.data.batch import IMAGE, LABEL, OTHER_IMAGE, OTHER_LABEL, ROW, WEIGHT, Batch, Example, Feature, tokens_in
from dtrain.models.nn import param as declare
from dtrain.models.nn.examples import Purpose
from dtrain.models.nn.model import Flops
from dtrain.models.parts import with_parts
from dtrain.optim.groups import grouped
from dtrain.optim.update import learning_rate, transformation
from dtrain.parallel.auto import others
from dtrain.parallel.engine import Traced, call_shapes, replicated
from dtrain.parallel.mesh import SEQUENCE, TENSOR
from dtrain.parallel.rules import Layout, with_default_dims
from dtrain.recipe.crosscheck import divisibility_problems
from dtrain.recipe.load import refuse_conflicts
from dtrain.recipe.recipe import Engine, Recipe
from dtrain.recipe.sizes import with_sizes

if TYPE_CHECKING:
    import optax

ROWS = Feature((), "uint32")
WEIGHTS = Feature((), "float32")


@dataclass(frozen=True)
class Assembly:
    """Everything that a run compiles and a plan analyses."""

    recipe: Recipe
    engine: Engine
    """The recipe's; what `auto` is on these devices."""
    model: Any
    """What is trained: the recipe's model, with its adapters and for its objective."""
    layout: Layout
    update: "optax.GradientTransformationExtraArgs"
    """The optimizer's."""
    shapes: State
    """The state as shapes, with their shardings."""
    batch: Batch
    """The shapes of the batches of one call of the training step, with their shardings."""
    steps: int
    """Optimizer steps of the whole run."""
    frozen: Mapping[str, Any]
    """The models whose parameters the objective takes from elsewhere, by their part of the tree."""

    @property
    def keyed(self) -> bool:
        """Whether every batch has the numbers of its rows, which random keys are made of."""
        return self.model.needs_keys

    @property
    def eval_batch(self) -> int:
        """Examples in one evaluation step."""
        return self.recipe.evaluate.batch or self.recipe.batch

    @property
    def make(self) -> Callable[..., State]:
        """Creates the initial state; see `state_initializer`."""
        return _initializer(self.recipe, self.layout, self.update)

    @property
    def flops(self) -> Flops:
        """The floating-point operations of one training step."""
        rows = prepared(self.recipe, self.layout.example)
        example = {name: Feature(of.shape[1:], str(of.dtype)) for name, of in rows.items()}
        return self.model.flops(example, self.recipe.batch, self.layout.declared)

    def train(self, gradients_too: bool = False) -> Traced:
        """Trace the training step; every call is a new trace. With `gradients_too`, its metrics have the gradients."""
        recipe, engine, layout = self.recipe, self.engine, self.layout
        loss = loss_of(self.model, self._prepare(True), recipe.precision, seed=recipe.seed)
        step = train_step(
            engine.grads(layout, loss, recipe.accumulate),
            self.update,
            learning_rate(recipe.optimizer, self.steps),
            layout.declared,
            keyed=self.keyed,
            skip=recipe.guard.not_finite == "skip",
            norms_every=recipe.track.every if recipe.track.norms else 0,
            gradients_too=gradients_too,
        )
        step = several_steps(step) if engine.steps_per_call > 1 else step
        out = (states.placement(self.shapes), replicated(layout))
        with self._tracing():
            return engine.trace(layout, step, self.shapes, self.batch, out=out, donate=True)

    def evaluate(self, state: State | None = None, examples: int | None = None) -> Traced:
        """Trace the evaluation step, of the state itself or of one with other shapes; every call is a new trace.

        `examples`: those of a batch, by default `eval_batch`."""
        recipe, engine = self.recipe, self.engine
        loss = loss_of(self.model, self._prepare(False), recipe.precision, seed=recipe.seed, train=False)
        step = eval_step(engine.sums(self.layout, loss, recipe.accumulate), self.keyed)
        return self._trace_forward(step, self.shapes if state is None else state, self.layout.example, examples)

    def train_loss(self, mixed: list[str]) -> Traced:
        """Trace a step that computes the loss as in training, of evaluation batches: with dropout, not augmented.

        `mixed` receives what of the context compares examples with each other.
        """
        recipe, engine = self.recipe, self.engine
        loss = loss_of(self.model, self._prepare(False), recipe.precision, seed=recipe.seed, mixed=mixed)
        step = eval_step(engine.sums(self.layout, loss, recipe.accumulate), self.keyed)
        return self._trace_forward(step, self.shapes, self.layout.example)

    def batch_loss(self, mixed: list[str]) -> Traced:
        """Trace a step that computes the loss of a training batch with weights, exactly as a training step computes it.

        `mixed`: as in `train_loss`.
        """
        recipe, engine = self.recipe, self.engine
        loss = loss_of(self.model, self._prepare(True), recipe.precision, seed=recipe.seed, mixed=mixed)
        step = loss_step(engine.sums(self.layout, loss, recipe.accumulate), self.keyed)
        rows = {**self.batch, **batch_shapes(engine, self.layout, {WEIGHT: WEIGHTS}, recipe.batch)}
        with self._tracing():
            return engine.trace(self.layout, step, self.shapes, rows, out=replicated(self.layout), donate=False)

    def predict(self, state: State, features: Example, purpose: Purpose = "prediction") -> Traced:
        """Trace a step that computes the predictions or samples for examples of these features, from such a state."""
        recipe = self.recipe
        outputs = outputs_of(self.model, self._prepare(False), recipe.precision, seed=recipe.seed, purpose=purpose)
        return self._trace_forward(predict_step(self.engine.rows(self.layout, outputs), self.keyed), state, features)

    def compile(self, step: Traced, warn: Callable[[str], None] = lambda _: None) -> jax.stages.Compiled:
        """Compile a traced step of this assembly for its devices, with the options of the engine, or with others where
        the compiler fails with them, which `warn` gets."""
        layout = self.layout
        return self.engine.compile(step, layout.platform, layout.chip, experts=self.experts, warn=warn)

    @property
    def experts(self) -> bool:
        """Whether the model has a mixture of experts."""
        return self.recipe.model.structure.mixture is not None

    def _trace_forward(
        self, step: Callable[[State, Batch], Any], state: State, features: Example, examples: int | None = None
    ) -> Traced:
        features = {**features, WEIGHT: WEIGHTS} | ({ROW: ROWS} if self.keyed else {})
        rows = batch_shapes(self.engine, self.layout, features, examples or self.eval_batch)
        with self._tracing():
            return self.engine.trace(self.layout, step, state, rows, out=replicated(self.layout), donate=False)

    def _prepare(self, train: bool) -> Callable[[Batch], Batch]:
        return lambda batch: self.recipe.data.prepare(batch, jax.random.key(self.recipe.seed), train)

    def _tracing(self) -> AbstractContextManager[None]:
        """The context in which a step is traced for the platform of the layout."""
        layout, sizes = self.layout, self.layout.sizes
        # a matrix product of all rows at once is what a CPU does fastest; under jit, a mesh that splits the tokens of a
        # row would make the compiler gather them first
        split = not self.engine.explicit and (sizes[SEQUENCE] > 1 or sizes[TENSOR] > 1)
        flat = layout.platform == "cpu" and not split
        return self.recipe.precision.tracing(flat, on_tpu=layout.platform == "tpu")


def assemble(
    recipe: Recipe, devices: Sequence[Device], example: Example, steps: int, frozen: Mapping[str, Any] = {}
) -> Assembly:
    """Assemble the recipe's run of `steps` optimizer steps on these devices; no file is opened.

    `frozen`: `frozen_models(recipe)`. Raises DataError if the model cannot take such examples, RecipeError if mesh,
    engine, batch and model do not fit.
    """
    recipe = with_sizes(recipe, example)
    for key, problem, hint in recipe.data.problems(recipe, example):
        raise RecipeError(f"{key}: {problem}", hint, key)
    recipe = replace(recipe, model=recipe.model.for_example(prepared(recipe, example)))
    model = recipe.minimised.wrap(recipe.model, recipe.lora, frozen)
    if mismatch := model.mismatch(example):
        raise DataError(mismatch, "change the model's sizes, or the data")
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    engine = engine_on(recipe, chip_of(devices[0].device_kind), len(devices), slices)
    layout = _layout(recipe, engine, model, devices, example)
    update = transformation(recipe.optimizer, layout.declared, steps)
    make = _initializer(recipe, layout, update)
    shapes = states.abstract(make, layout, recipe.optimizer.state_dims, recipe.optimizer.apart)
    features = dict(example)
    if recipe.data.needs_row_numbers or model.needs_keys:
        features |= {ROW: ROWS}
    if recipe.class_weights:
        features |= {WEIGHT: WEIGHTS}
    if recipe.data.needs_pairs:
        features |= {OTHER_IMAGE: example[IMAGE], OTHER_LABEL: example[LABEL]}
    if model.user_code:
        classes = example[LABEL].values if LABEL in example else None
        abstract = declare.abstract(layout.declared, recipe.precision.compute)
        refuse_few_classes(model, abstract, prepared(recipe, {**example, ROW: ROWS}), classes)
        refuse_ignored_labels(model, abstract, prepared(recipe, features, True))
    batch = batch_shapes(engine, layout, features, recipe.batch)
    batch = call_shapes(layout, batch, engine.steps_per_call)
    return Assembly(recipe, engine, model, layout, update, shapes=shapes, batch=batch, steps=steps, frozen=frozen)


def engine_on(recipe: Recipe, chip: Chip | None, devices: int, slices: int) -> Engine:
    """The recipe's engine; what `auto` is on so many devices of this chip. Engines were compared with language models,
    on one slice."""
    layout = Layout(recipe.mesh.sizes(devices), recipe.mesh.table(), {})
    compared = recipe.model.generates and not recipe.model.user_code and slices == 1
    row = tokens_in(recipe.data.example() or {}) if compared else 0
    tokens = row * recipe.batch / recipe.accumulate / devices
    engine: Engine = recipe.engine.on(layout, chip, devices, tokens=tokens)
    for key, problem, hint in engine.problems(recipe) if chip and chip.platform == "tpu" else ():  # of what auto is
        raise RecipeError(f"{key}: {problem}", hint, key)
    return engine


def _layout(recipe: Recipe, engine: Engine, model: Any, devices: Sequence[Device], example: Example) -> Layout:
    """The model's parameters on the recipe's mesh. RecipeError if mesh, engine, batch and model do not fit."""
    sizes = recipe.mesh.jax_sizes(devices) if engine.explicit else recipe.mesh.sizes(len(devices))
    declared = grouped(with_parts(with_default_dims(model.params(), sizes), recipe.parts), recipe.optimizer.groups)
    layout = Layout(sizes, recipe.mesh.table(), declared, engine.arranged(recipe.mesh.build(sizes, devices)), example)
    layout.check()
    if sizes[SEQUENCE] > 1 and not model.split_rows:
        why, hint = "splits every row, and this model or its objective needs whole rows", "use sequence: 1"
        if model.user_code:
            why = "splits every row, and the model does not declare split_rows"
            hint += ", or set split_rows = True in the model's class once it uses ctx.places and ctx.attend"
        raise RecipeError(f"mesh.sequence = {sizes['sequence']} {why}", hint)
    if refusal := engine.refusal(layout):
        raise RecipeError(f"engine: {refusal}", others(layout))
    problems = [*divisibility_problems("batch", recipe.batch, sizes, recipe.accumulate)]
    problems += divisibility_problems("evaluate.batch", recipe.evaluate.batch or recipe.batch, sizes, 1)
    for path, message, hint in problems:
        raise RecipeError(f"{path}: {message}", hint)
    return layout


def _initializer(recipe: Recipe, layout: Layout, update: "optax.GradientTransformation") -> Callable[..., State]:
    return states.state_initializer(layout.declared, update, recipe.precision.params, recipe.seed)


def batch_shapes(engine: Engine, layout: Layout, features: Mapping[str, Feature], examples: int) -> Batch:
    """A global batch of so many examples as shapes with their shardings, (examples, ...) for each feature."""
    placed = {name: engine.place(layout, name, (examples, *feature.shape)) for name, feature in features.items()}
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(features[name].dtype), sharding=sharding)
        for name, (shape, sharding) in placed.items()
    }


def one_step_per_call(recipe: Recipe) -> Recipe:
    """The recipe with a training step that is called for every batch."""
    return replace(recipe, engine=replace(recipe.engine, steps_per_call=1))


def prepared(recipe: Recipe, example: Example, train: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of one example as the model receives them: prepared, and in the dtype in which it computes."""
    rows = {name: jax.ShapeDtypeStruct((1, *of.shape), jnp.dtype(of.dtype)) for name, of in example.items()}

    def prepare(batch: Batch) -> Batch:
        rows = recipe.data.prepare(batch, jax.random.key(0), train)
        return recipe.precision.cast_batch(rows, recipe.model.exact_inputs)

    return jax.eval_shape(prepare, rows)


def with_sums(recipe: Recipe) -> Recipe | None:
    """The recipe with that setting; None if it has it, computes in float32, or cannot have it."""
    precision = recipe.precision
    if precision.reduce == "compute" or precision.compute == "float32":
        return None
    changed = replace(recipe, precision=replace(precision, reduce="compute"))
    with suppress(RecipeError):
        refuse_conflicts(changed)
        return changed
    return None
