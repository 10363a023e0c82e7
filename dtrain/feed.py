"""Batches from their source onto the devices."""

import dataclasses
import itertools
from collections.abc import Iterator

from dtrain.assembly import Assembly
from dtrain.batch import Batch
from dtrain.data.batches import EvalBatches, TrainBatches, stream
from dtrain.data.order import Order
from dtrain.data.source import Source
from dtrain.parallel.engine import local_rows, put


def train_batches(made: Assembly, source: Source, start: int, steps: int) -> Iterator[Batch]:
    """Batches `start` to `steps` on the devices."""
    recipe, layout = made.recipe, made.layout
    local, order = local_rows(layout, recipe.batch), Order(len(source), recipe.seed, source.starts)
    host = TrainBatches(source, order, recipe.batch, local, start, steps, recipe.data.keyed)
    return (put(recipe.engine, layout, batch, recipe.batch) for batch in stream(host, recipe.data.load))


def eval_batches(made: Assembly, source: Source, limit: int | None) -> Iterator[Batch]:
    """Every held-out example once, on the devices; at most `limit` batches of them."""
    size, layout = made.eval_batch, made.layout
    host = EvalBatches(source, size, local_rows(layout, size))
    load = dataclasses.replace(made.recipe.data.load, workers=0)
    return (put(made.recipe.engine, layout, batch, size) for batch in itertools.islice(stream(host, load), limit))
