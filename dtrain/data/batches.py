"""Which examples make batch k, and how they are read ahead.

Row r of a run is drawn from epoch r // n at place r % n of that epoch's own permutation, and batch
k is rows k * batch to (k + 1) * batch - 1. So a batch is a function of (seed, k) alone: the same for
every number of processes, and a step number is all there is to save.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.batch import Batch
from dtrain.data.order import Order
from dtrain.data.source import Arrays, Load, Source


@dataclass(frozen=True)
class TrainBatches:
    """This process's rows of batches `start` to `steps`; `keyed` adds each row's number."""

    source: Source
    order: Order
    batch: int
    local: np.ndarray
    start: int
    steps: int
    keyed: bool

    def __len__(self) -> int:
        return max(0, self.steps - self.start)

    def __getitem__(self, index: int) -> Batch:
        if index >= len(self):
            raise IndexError(index)
        rows = (self.start + index) * self.batch + self.local
        found = self.source.rows(self.order(rows))
        return found | {"row": rows.astype(np.uint32)} if self.keyed else found


@dataclass(frozen=True)
class EvalBatches:
    """This process's rows of every example once, in order; the last batch padded with weight 0."""

    source: Source
    batch: int
    local: np.ndarray

    def __len__(self) -> int:
        return (len(self.source) + self.batch - 1) // self.batch

    def __getitem__(self, index: int) -> Batch:
        if index >= len(self):
            raise IndexError(index)
        rows = index * self.batch + self.local
        real = rows < len(self.source)
        return self.source.rows(np.where(real, rows, 0)) | {"weight": real.astype(np.float32)}


def stream(batches: TrainBatches | EvalBatches, load: Load) -> Iterator[Batch]:
    """The batches in turn, the same for every `load`: read ahead by grain, or directly where
    nothing is to be read ahead, as with examples that lie in memory."""
    ahead = load.prefetch if load.prefetch is not None else 0 if isinstance(batches.source, Arrays) else 2
    if not ahead and not load.workers:
        return (batches[index] for index in range(len(batches)))
    import grain

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset: Any = grain.MapDataset.source(batches).to_iter_dataset(options)
    if load.workers:
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # grain reads absl flags that only an absl program parses
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=load.workers))
    if ahead:
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=ahead)
    return iter(dataset)
