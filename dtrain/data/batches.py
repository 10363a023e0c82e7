"""Which examples make batch k, and how they are read ahead.

Row r of a run is drawn from epoch r // n at place r % n of that epoch's own permutation, and batch
k is rows k * batch to (k + 1) * batch - 1. So a batch is a function of (seed, k) alone: the same for
every number of processes, and a step number is all there is to save.
"""

import os
import re
import signal
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.core.errors import EnvironmentFault
from dtrain.core.parent import exit_with_caller
from dtrain.data.batch import Batch
from dtrain.data.order import Order
from dtrain.data.source import Arrays, Load, Source

QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"
DEATHS = 3
"""How often a data worker may die at one batch."""


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


def stream(
    batches: TrainBatches | EvalBatches, load: Load, warn: Callable[[str], None] = print
) -> Generator[Batch, None, None]:
    """The batches in turn, the same for every `load`: read ahead by grain, or directly where
    nothing is to be read ahead, as with examples that lie in memory.

    A worker that is killed is replaced; EnvironmentFault where that comes again without a batch in between.
    """
    in_memory = isinstance(batches.source, Arrays)
    ahead = load.prefetch if load.prefetch is not None else 0 if in_memory else 2
    workers = 0 if in_memory else load.workers  # each would hold a copy of all examples
    if not ahead and not workers:
        yield from (batches[index] for index in range(len(batches)))
        return
    given, deaths = 0, 0
    while True:
        with closing(_read_ahead(_After(batches, given), workers, ahead)) as found:
            try:
                for batch in found:
                    yield batch
                    given, deaths = given + 1, 0
                return
            except RuntimeError as error:  # grain raises no type of its own
                if "Worker process was terminated" not in str(error):
                    raise
                deaths += 1
                if deaths > DEATHS:
                    message = f"data workers die, {deaths} times at the same batch: {_code(error)}"
                    hint = "they may lack memory: fewer data.load.workers; 0 reads in the main process"
                    raise EnvironmentFault(message, hint) from error
                warn(f"a data worker died ({_code(error)}); others go on from the same batch")


@dataclass(frozen=True)
class _After:
    """The batches from one on."""

    batches: TrainBatches | EvalBatches
    given: int

    def __len__(self) -> int:
        return len(self.batches) - self.given

    def __getitem__(self, index: int) -> Batch:
        return self.batches[self.given + index]


def _read_ahead(batches: _After, workers: int, ahead: int) -> Any:
    import grain

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset: Any = grain.MapDataset.source(batches).to_iter_dataset(options)
    if workers:
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # grain reads absl flags that only an absl program parses
        os.environ.setdefault("PYTHONWARNINGS", QUIET)  # of shared memory that arrays still hold at the end
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers), worker_init_fn=_begin)
    if ahead:
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=ahead)
    return iter(dataset)


def _begin(_worker: int, _workers: int) -> None:
    """A worker leaves Ctrl-C, which all processes of a terminal get, to the one that it works for, and goes with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_caller()


def _code(error: RuntimeError) -> str:
    found = re.search(r"exit code (-?\d+)", str(error))
    code = int(found.group(1)) if found else 0
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
