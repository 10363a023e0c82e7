"""Batches from their source onto the devices."""

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from dtrain.data.batch import Batch
from dtrain.data.batches import EvalBatches, TrainBatches, stream
from dtrain.data.order import Order
from dtrain.data.source import Source
from dtrain.models.nn.model import Loss
from dtrain.parallel.engine import Put
from dtrain.train.assembly import Assembly
from dtrain.train.contract import refuse_broken, rows_of
from dtrain.train.state import State


def train_batches(
    assembly: Assembly, source: Source, start: int, steps: int, warn: Callable[[str], None]
) -> Generator[Batch, None, None]:
    """Batches `start` to `steps` on the devices; `warn` hears of workers that died on the way."""
    recipe, order = assembly.recipe, Order(len(source), assembly.recipe.seed, source.starts)
    put = Put(recipe.engine, assembly.layout, recipe.batch)
    host = TrainBatches(source, order, recipe.batch, put.held, start, steps, recipe.data.keyed)
    with closing(stream(host, recipe.data.load, warn)) as found:
        for batch in found:
            yield put(batch)


def refuse_broken_contract(
    assembly: Assembly, evaluate: Callable[[State, Batch], Loss], source: Source, state: State
) -> str:
    """RecipeError where a custom model's loss is no sum over examples, which `guard.contract` asks for.

    What was not checked, where an evaluation has too few examples to compare; else empty.
    """
    recipe, put = assembly.recipe, Put(assembly.recipe.engine, assembly.layout, assembly.eval_batch)
    if recipe.model.kind != "custom" or not recipe.guard.contract:
        return ""
    exact = recipe.precision.compute == recipe.precision.loss == "float32"
    refuse_broken(lambda batch: evaluate(state, put(batch)), rows_of(source, put.held), exact)
    each = assembly.eval_batch if recipe.engine.kind == "jit" else assembly.eval_batch // assembly.layout.parts("batch")
    missing = "whether the loss compares examples with each other was not checked: an evaluation has one"
    where = "" if recipe.engine.kind == "jit" else " on a device"
    return f"{missing}{where} at a time (evaluate.batch)" if each < 2 else ""


def eval_batches(assembly: Assembly, source: Source, limit: int | None) -> Iterator[Batch]:
    """Every held-out example once, on the devices; at most `limit` batches of them."""
    put = Put(assembly.recipe.engine, assembly.layout, assembly.eval_batch)
    host = EvalBatches(source, assembly.eval_batch, put.held)
    load = dataclasses.replace(assembly.recipe.data.load, workers=0)
    return (put(batch) for batch in itertools.islice(stream(host, load), limit))
