"""The examples of batch k, and prefetching.

With n examples, row r of a run is the example at index r % n of the permutation of epoch r // n, and batch k consists
of the rows k * batch to (k + 1) * batch - 1. So a batch is a function of (seed, k) alone: it is the same for every
number of processes, and the step number is the only state to save.
"""

import os
import re
import signal
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.core.errors import DataError, EnvironmentFault
from dtrain.core.parent import exit_with_caller
from dtrain.data.batch import IMAGE, LABEL, OTHER_IMAGE, OTHER_LABEL, ROW, WEIGHT, Batch
from dtrain.data.source import CHANGED, Load, Source

QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"
DEATHS = 3
"""Number of worker deaths at one batch that are tolerated."""


@dataclass(frozen=True)
class TrainBatches:
    """The rows of this process in the batches `start` to `steps - 1`.

    `local`: indices of its rows within a batch. `keyed`: add the global row numbers as feature `row`. `paired`: add
    image and label of the other row of each pair 2i, 2i + 1.
    """

    source: Source
    order: Callable[[np.ndarray], np.ndarray]
    """The index of the example of each row."""
    batch: int
    local: np.ndarray
    start: int
    steps: int
    keyed: bool
    paired: bool = False
    weights: np.ndarray | None = None
    """How much an example of each class counts (classes,)."""

    def __len__(self) -> int:
        return max(0, self.steps - self.start)

    def __getitem__(self, index: int) -> Batch:
        if index >= len(self):
            raise IndexError(index)
        rows = (self.start + index) * self.batch + self.local
        batch = self._pairs(rows) if self.paired else self.source.rows(self.order(rows))
        if self.weights is not None:
            batch = batch | {WEIGHT: batch.get(WEIGHT, np.float32(1)) * self.weights[batch[LABEL]]}
        return batch | {ROW: rows.astype(np.uint32)} if self.keyed else batch

    def _pairs(self, rows: np.ndarray) -> Batch:
        """The examples of the rows and of the other rows of their pairs; each is read once."""
        wanted = np.union1d(rows, rows ^ 1)
        read = self.source.rows(self.order(wanted))
        own, other = np.searchsorted(wanted, rows), np.searchsorted(wanted, rows ^ 1)
        batch = {name: values[own] for name, values in read.items()}
        return batch | {OTHER_IMAGE: read[IMAGE][other], OTHER_LABEL: read[LABEL][other]}


@dataclass(frozen=True)
class EvalBatches:
    """The rows of this process in batches of every example once, in order; padding in the last batch has weight 0."""

    source: Source
    batch: int
    local: np.ndarray
    keyed: bool = False
    """Add the numbers of the examples as feature `row`."""

    def __len__(self) -> int:
        return (len(self.source) + self.batch - 1) // self.batch

    def __getitem__(self, index: int) -> Batch:
        if index >= len(self):
            raise IndexError(index)
        rows = index * self.batch + self.local
        real = rows < len(self.source)
        batch = self.source.rows(np.where(real, rows, 0)) | {WEIGHT: real.astype(np.float32)}
        return batch | {ROW: rows.astype(np.uint32)} if self.keyed else batch


def stream(
    batches: TrainBatches | EvalBatches, load: Load, warn: Callable[[str], None] = print
) -> Generator[Batch, None, None]:
    """Yield the batches in order, the same for every `load`; prefetched by grain, or read directly.

    Without settings in `load`, examples in memory are read directly. A worker that dies is replaced; EnvironmentFault
    after more than DEATHS deaths at the same batch.
    """
    in_memory = batches.source.in_memory
    ahead = load.prefetch if load.prefetch is not None else 0 if in_memory else 2
    workers = 0 if in_memory else load.workers  # each worker would hold a copy of all examples
    if not ahead and not workers:
        yield from (batches[index] for index in range(len(batches)))
        return
    delivered, deaths = 0, 0
    while True:
        with closing(_prefetched(_Remaining(batches, delivered), workers, ahead)) as prefetched:
            try:
                for batch in prefetched:
                    yield batch
                    delivered, deaths = delivered + 1, 0
                return
            except RuntimeError as error:  # grain has no error class for this
                if "Worker process was terminated" not in str(error):
                    raise
                deaths += 1
                if deaths > DEATHS:
                    message = f"data workers died {deaths} times at the same batch: {_code(error)}"
                    hint = "the host may lack memory: lower data.load.workers; 0 reads in the main process"
                    raise EnvironmentFault(message, hint) from error
                warn(f"a data worker died ({_code(error)}); new workers continue from the same batch")


@dataclass(frozen=True)
class _Remaining:
    """The batches after the first `delivered` ones."""

    batches: TrainBatches | EvalBatches
    delivered: int

    def __len__(self) -> int:
        return len(self.batches) - self.delivered

    def __getitem__(self, index: int) -> Batch:
        return self.batches[self.delivered + index]


def _prefetched(batches: _Remaining, workers: int, ahead: int) -> Any:
    import grain

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset: Any = grain.MapDataset.source(batches).to_iter_dataset(options)
    if workers:
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # grain reads absl flags, which only absl.app.run would parse
        os.environ.setdefault("PYTHONWARNINGS", QUIET)  # warns at exit of shared memory that arrays still use
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers), worker_init_fn=_begin)
    if ahead:
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=ahead)
    return iter(dataset)


def _begin(_worker: int, _workers: int) -> None:
    """Start a worker: it ignores Ctrl-C, which a terminal sends to all processes, and exits with the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_caller()


def _code(error: RuntimeError) -> str:
    """How the worker ended: its exit code, or the signal that killed it."""
    match = re.search(r"exit code (-?\d+)", str(error))
    code = int(match.group(1)) if match else 0
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def refuse_changed(*sources: Source) -> None:
    """DataError if a file of one of the sources changed after it was opened."""
    for changed in filter(None, (source.changed() for source in sources)):
        raise DataError(changed, CHANGED)
