"""Batches from their source onto the devices."""

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from dtrain.assembly import Assembly
from dtrain.batch import Batch
from dtrain.data.batches import EvalBatches, TrainBatches, stream
from dtrain.data.order import Order
from dtrain.data.source import Source
from dtrain.parallel.engine import local_rows, put


def train_batches(
    made: Assembly, source: Source, start: int, steps: int, warn: Callable[[str], None]
) -> Generator[Batch, None, None]:
    """Batches `start` to `steps` on the devices; `warn` hears of workers that died on the way."""
    recipe, layout = made.recipe, made.layout
    local, order = local_rows(layout, recipe.batch), Order(len(source), recipe.seed, source.starts)
    host = TrainBatches(source, order, recipe.batch, local, start, steps, recipe.data.keyed)
    with closing(stream(host, recipe.data.load, warn)) as found:
        for batch in found:
            yield put(recipe.engine, layout, batch, recipe.batch)


def eval_batches(made: Assembly, source: Source, limit: int | None) -> Iterator[Batch]:
    """Every held-out example once, on the devices; at most `limit` batches of them."""
    size, layout = made.eval_batch, made.layout
    host = EvalBatches(source, size, local_rows(layout, size))
    load = dataclasses.replace(made.recipe.data.load, workers=0)
    return (put(made.recipe.engine, layout, batch, size) for batch in itertools.islice(stream(host, load), limit))
