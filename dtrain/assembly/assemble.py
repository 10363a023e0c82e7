"""Assemble mesh, model, data, optimizer and step from a recipe, with abstract arrays: nothing is executed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.assembly import state as states
from dtrain.assembly.objective import trained_model
from dtrain.assembly.state import State
from dtrain.assembly.step import eval_step, loss_of, outputs_of, predict_step, several_steps, train_step
from dtrain.assembly.trace_checks import refuse_few_classes, refuse_ignored_labels
from dtrain.core.errors import DataError, RecipeError
from dtrain.core.types import Device
from dtrain.data.batch import IMAGE, LABEL, OTHER_IMAGE, OTHER_LABEL, WEIGHT, Batch, Example, Feature
from dtrain.models.nn import param as declare
from dtrain.models.nn.model import Flops
from dtrain.models.nn.precision import Precision
from dtrain.optim.groups import grouped
from dtrain.optim.update import learning_rate, transformation
from dtrain.parallel.engine import Traced, call_shapes, replicated
from dtrain.parallel.rules import Layout, with_default_dims
from dtrain.recipe.crosscheck import divides
from dtrain.recipe.recipe import Recipe

ROW = Feature((), "uint32")
WEIGHTS = Feature((), "float32")


@dataclass(frozen=True)
class Assembly:
    """Everything that a run compiles and a plan analyses."""

    recipe: Recipe
    model: Any
    """What is trained: the recipe's model, with its adapters and for its objective."""
    layout: Layout
    make: Callable[..., State]
    """Creates the initial state; see `state_initializer`."""
    shapes: State
    """The state as shapes, with their shardings."""
    train: Callable[[], Traced]
    """Traces the training step; every call is a new trace."""
    evaluate: Callable[..., Traced]
    """Traces the evaluation step; every call is a new trace. `state=` gives shapes of another state."""
    predict: Callable[[State, Example], Traced]
    """Traces a step that computes the predictions for examples of these features, from such a state."""
    eval_batch: int
    """Examples in one evaluation step."""
    batch: Batch
    """The shapes of the batches of one call of the training step, with their shardings."""
    steps: int
    """Optimizer steps of the whole run."""

    @property
    def flops(self) -> Flops:
        """The floating-point operations of one training step."""
        rows = prepared(self.recipe, self.layout.example)
        example = {name: Feature(of.shape[1:], str(of.dtype)) for name, of in rows.items()}
        return self.model.flops(example, self.recipe.batch, self.layout.declared)


def assemble(recipe: Recipe, devices: Sequence[Device], example: Example, steps: int) -> Assembly:
    """Assemble the recipe's run of `steps` optimizer steps on these devices.

    Raises DataError if the model cannot take such examples, RecipeError if mesh, engine, batch and model do not fit.
    """
    data, engine, precision = recipe.data, recipe.engine, recipe.precision
    recipe = replace(recipe, model=recipe.model.for_example(prepared(recipe, example)))
    model = trained_model(recipe)
    mismatch = model.mismatch(example)
    if mismatch:
        raise DataError(mismatch, "change the model's sizes, or the data")
    explicit = engine.explicit
    sizes = recipe.mesh.jax_sizes(devices) if explicit else recipe.mesh.sizes(len(devices))
    declared = grouped(with_default_dims(model.params(), sizes), recipe.optimizer.groups)
    layout = Layout(sizes, recipe.mesh.table(), declared, engine.arranged(recipe.mesh.build(sizes, devices)), example)
    layout.check()
    if sizes["sequence"] > 1 and not model.split_rows:
        why = "splits every row, and the model does not declare split_rows"
        hint = "use sequence: 1, or set split_rows = True in the model's class once it uses ctx.places and ctx.attend"
        raise RecipeError(f"mesh.sequence = {sizes['sequence']} {why}", hint)
    refusal = engine.refusal(layout)
    if refusal:
        raise RecipeError(f"engine: {refusal}", "use engine: shard_map or jit")
    eval_batch = recipe.evaluate.batch or recipe.batch
    for path, batch, micro in (
        ("batch", recipe.batch, recipe.accumulate),
        ("evaluate.batch", eval_batch, 1),
    ):
        for where, message, hint in divides(path, batch, sizes, micro):
            raise RecipeError(f"{where}: {message}", hint)

    update = transformation(recipe.optimizer, layout.declared, steps)
    rate = learning_rate(recipe.optimizer, steps)
    make = states.state_initializer(layout.declared, update, precision.params, recipe.seed)
    shapes = states.abstract(make, layout, recipe.optimizer.state_dims, recipe.optimizer.apart)

    def prepare(train: bool) -> Callable[[Batch], Batch]:
        return lambda batch: data.prepare(batch, jax.random.key(recipe.seed), train)

    def batch_shapes(features: dict[str, Feature], examples: int) -> Batch:
        placed = {name: engine.place(layout, name, (examples, *feature.shape)) for name, feature in features.items()}
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(features[name].dtype), sharding=sharding)
            for name, (shape, sharding) in placed.items()
        }

    keyed = data.needs_row_numbers or bool(model.user_code)  # a user's model may ask for random keys
    features = dict(example) | ({"row": ROW} if keyed else {})
    if data.needs_pairs:
        features |= {OTHER_IMAGE: example[IMAGE], OTHER_LABEL: example[LABEL]}
    batch, whole = call_shapes(layout, batch_shapes(features, recipe.batch), engine.steps_per_call), replicated(layout)

    if model.user_code:
        classes = example[LABEL].values if LABEL in example else None
        refuse_few_classes(model, declare.abstract(declared, precision.compute), prepared(recipe, example), classes)
        refuse_ignored_labels(model, declare.abstract(declared, precision.compute), prepared(recipe, features, True))

    def train() -> Traced:
        step = train_step(
            engine.grads(layout, loss_of(model, prepare(True), precision, seed=recipe.seed), recipe.accumulate),
            update,
            rate,
            layout.declared,
            skip=recipe.guard.not_finite == "skip",
            norms_every=recipe.track.every if recipe.track.norms else 0,
        )
        step = several_steps(step) if engine.steps_per_call > 1 else step
        with _tracing(precision, layout, explicit):
            return engine.trace(layout, step, shapes, batch, out=(states.placement(shapes), whole), donate=True)

    def evaluate(state: State = shapes) -> Traced:
        loss = loss_of(model, prepare(False), precision, seed=recipe.seed, train=False)
        step = eval_step(engine.sums(layout, loss, recipe.accumulate))
        rows = batch_shapes(dict(example) | {WEIGHT: WEIGHTS}, eval_batch)
        with _tracing(precision, layout, explicit):
            return engine.trace(layout, step, state, rows, out=whole, donate=False)

    def predict(state: State, features: Example) -> Traced:
        step = predict_step(engine.rows(layout, outputs_of(model, prepare(False), precision)))
        rows = batch_shapes(dict(features) | {WEIGHT: WEIGHTS}, eval_batch)
        with _tracing(precision, layout, explicit):
            return engine.trace(layout, step, state, rows, out=whole, donate=False)

    return Assembly(
        recipe,
        model,
        layout,
        make,
        shapes=shapes,
        train=train,
        evaluate=evaluate,
        predict=predict,
        eval_batch=eval_batch,
        batch=batch,
        steps=steps,
    )


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


def _tracing(precision: Precision, layout: Layout, explicit: bool) -> AbstractContextManager[None]:
    """The context in which a step is traced for the platform of the layout.

    On a CPU, activations are multiplied as matrices, unless the compiler would have to gather tokens.
    """
    flat = layout.platform == "cpu" and (explicit or layout.sizes["sequence"] == layout.sizes["tensor"] == 1)
    return precision.tracing(flat, on_tpu=layout.platform == "tpu")
