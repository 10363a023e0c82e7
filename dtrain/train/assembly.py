"""Mesh, model, data, optimizer and step put together from a recipe: shapes only, nothing runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dtrain.core.errors import DataError, RecipeError
from dtrain.data.batch import Batch, Example, Feature
from dtrain.optim.update import learning_rate, transformation
from dtrain.parallel.rules import Layout
from dtrain.recipe.crosscheck import divides
from dtrain.recipe.recipe import Recipe
from dtrain.train import state as states
from dtrain.train.state import State
from dtrain.train.step import eval_step, loss_of, train_step

ROW = Feature((), "uint32")
WEIGHT = Feature((), "float32")


@dataclass(frozen=True)
class Assembly:
    """Everything that a run compiles, and that a plan reads."""

    recipe: Recipe
    layout: Layout
    make: Callable[..., State]
    shapes: State
    train: Callable[[], jax.stages.Traced]
    """Traces the training step, anew at each call."""
    evaluate: Callable[[], jax.stages.Traced]
    """Traces the evaluation step, anew at each call."""
    eval_batch: int
    """Examples of one evaluation step."""
    batch: Batch
    """The shapes of one training batch, with their shardings."""
    steps: int
    """Optimizer steps of the whole run."""


def assemble(recipe: Recipe, devices: Sequence[Any], example: Example, steps: int) -> Assembly:
    """The recipe's run on those devices. RecipeError or DataError where parts do not fit together."""
    model, data, engine, precision = recipe.model, recipe.data, recipe.engine, recipe.precision
    mismatch = model.mismatch(example)
    if mismatch:
        raise DataError(mismatch, "change the model's sizes, or the data")
    by_hand = engine.kind != "jit"  # the compiler finds its own way along a network
    sizes = recipe.mesh.laid(devices) if by_hand else recipe.mesh.sizes(len(devices))
    layout = Layout(sizes, recipe.mesh.table(), model.params(), recipe.mesh.build(sizes, devices), example)
    layout.check()
    if sizes["sequence"] > 1 and not getattr(model, "split_rows", True):
        why = "splits every row, and the model does not state that it takes parts"
        hint = "give its class split_rows = True once it uses ctx.places and ctx.attend, or use sequence: 1"
        raise RecipeError(f"mesh.sequence = {sizes['sequence']} {why}", hint)
    refusal = engine.refusal(layout, len({device.process_index for device in devices}))
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
    shapes = states.abstract(make, update, layout, recipe.optimizer.state_dims)
    whole = layout.sharding(PartitionSpec())

    def prepare(train: bool) -> Callable[[Batch], Batch]:
        return lambda batch: data.prepare(batch, jax.random.key(recipe.seed), train)

    def batch_shapes(features: dict[str, Feature], examples: int) -> Batch:
        placed = {name: engine.place(layout, name, (examples, *feature.shape)) for name, feature in features.items()}
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(features[name].dtype), sharding=sharding)
            for name, (shape, sharding) in placed.items()
        }

    batch = batch_shapes(dict(example) | ({"row": ROW} if data.keyed else {}), recipe.batch)

    def train() -> jax.stages.Traced:
        step = train_step(
            engine.grads(layout, loss_of(model, prepare(True), precision), recipe.accumulate),
            update,
            rate,
            layout.declared,
            skip=recipe.guard.not_finite == "skip",
        )
        with precision.tracing():
            return engine.trace(layout, step, shapes, batch, out=(states.placement(shapes), whole), donate=True)

    def evaluate() -> jax.stages.Traced:
        step = eval_step(engine.sums(layout, loss_of(model, prepare(False), precision), recipe.accumulate))
        rows = batch_shapes(dict(example) | {"weight": WEIGHT}, eval_batch)
        with precision.tracing():
            return engine.trace(layout, step, shapes, rows, out=whole, donate=False)

    return Assembly(recipe, layout, make, shapes, train, evaluate, eval_batch, batch, steps)
