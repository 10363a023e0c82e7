"""The input pipeline: batches from their source onto the devices."""

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing

from dtrain.data.batch import ROW, Batch
from dtrain.data.batches import EvalBatches, TrainBatches, stream
from dtrain.data.mixture import Mixed, MixedOrder
from dtrain.data.order import Order
from dtrain.data.source import Source
from dtrain.models.nn.model import Loss
from dtrain.parallel.engine import Put
from dtrain.train.assembly import Assembly
from dtrain.train.contract import refuse_broken, rows_of
from dtrain.train.state import State


def train_batches(
    assembly: Assembly,
    source: Source,
    start: int,
    steps: int,
    warn: Callable[[str], None],
    calls: Iterable[range] | None = None,
) -> Generator[Batch, None, None]:
    """Yield batches `start` to `steps` - 1 on the devices. `warn` receives a message if a worker process dies.

    With several steps per call, `calls` has the steps of each call, whose batches are yielded together.
    """
    recipe = assembly.recipe
    order = order_of(source, recipe.seed, recipe.batch)
    put = Put(recipe.engine, assembly.layout, recipe.batch)
    keyed, paired = ROW in assembly.batch, recipe.data.paired
    host = TrainBatches(
        source, order, recipe.batch, local=put.held, start=start, steps=steps, keyed=keyed, paired=paired
    )
    with closing(stream(host, recipe.data.load, warn)) as batches:
        if (most := recipe.engine.steps_per_call) == 1:
            for batch in batches:
                yield put(batch)
        else:
            for call in calls or ():
                yield put.several(list(itertools.islice(batches, len(call))), most)


def order_of(source: Source, seed: int, batch: int) -> Order | MixedOrder:
    """The example of each row of a run."""
    return source.order(seed, batch) if isinstance(source, Mixed) else Order(len(source), seed, source.starts)


def refuse_broken_contract(
    assembly: Assembly, evaluate: Callable[[State, Batch], Loss], source: Source, state: State
) -> str:
    """Raise RecipeError if the loss of a custom model is not a sum over examples (`guard.contract`).

    Returns a warning if an evaluation has too few examples to check this, else an empty string.
    """
    recipe, put = assembly.recipe, Put(assembly.recipe.engine, assembly.layout, assembly.eval_batch)
    if recipe.model.kind != "custom" or not recipe.guard.contract:
        return ""
    exact = recipe.precision.compute == recipe.precision.loss == "float32"
    refuse_broken(lambda batch: evaluate(state, put(batch)), rows_of(source, put.held), exact)
    each = assembly.eval_batch if recipe.engine.kind == "jit" else assembly.eval_batch // assembly.layout.parts("batch")
    missing = "could not check whether the loss compares examples with each other: evaluate.batch has one example"
    where = "" if recipe.engine.kind == "jit" else " per device"
    return f"{missing}{where}" if each < 2 else ""


def eval_batches(assembly: Assembly, source: Source, limit: int | None) -> Iterator[Batch]:
    """Batches with every held-out example once, on the devices; at most `limit` batches."""
    put = Put(assembly.recipe.engine, assembly.layout, assembly.eval_batch)
    host = EvalBatches(source, assembly.eval_batch, put.held)
    load = dataclasses.replace(assembly.recipe.data.load, workers=0)
    return (put(batch) for batch in itertools.islice(stream(host, load), limit))
