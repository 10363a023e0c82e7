"""The source and the example of each row of a mixture.

Both depend on the seed and the row's number alone, so that a mixture resumes exactly, on any number of processes. Rows
are counted in blocks of BLOCK: in each, every source has its share of the rows, in an order drawn for that block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dtrain.core.errors import FieldError
from dtrain.data.order import Order

BLOCK = 1000
"""Rows in which every source has exactly its share: weights are rounded to a thousandth."""
Block = tuple[np.ndarray, np.ndarray]
"""The source of each row, and how many rows of that source came before it in the block."""


def shares(weights: Sequence[float], names: Sequence[str]) -> np.ndarray:
    """The rows of each source in a block: proportional to the weights, by largest remainder. FieldError if a source
    with a weight has no row, or if all weights are 0."""
    total = sum(weights)
    if total <= 0:
        raise FieldError("sources", "all weights are 0")
    exact = np.array(weights) * BLOCK / total
    rows = np.floor(exact).astype(np.int64)
    for number in np.argsort(rows - exact, kind="stable")[: BLOCK - rows.sum()]:
        rows[number] += 1
    for name, weight, count in zip(names, weights, rows.tolist(), strict=True):
        if weight > 0 and count == 0:
            raise FieldError("sources", f"{name} has less than a thousandth of the weights; give it more, or 0")
    return rows


@dataclass(frozen=True)
class MixedOrder:
    """The index of the example of each row of a run, as in `Order`."""

    names: tuple[str, ...]
    orders: tuple[Order, ...]
    offsets: np.ndarray
    phases: tuple[tuple[int, np.ndarray], ...]
    """The first row of each phase, and the rows of each source in a block."""
    seed: int
    _blocks: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        sources, numbers = self.drawn(rows)
        indices = np.empty(len(rows), np.int64)
        for source, order in enumerate(self.orders):
            mine = sources == source
            if mine.any():
                indices[mine] = self.offsets[source] + order(numbers[mine])
        return indices

    def drawn(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each row, and how many rows of that source came before it in the run."""
        sources, numbers = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        firsts = np.array([first for first, _ in self.phases])
        phases = np.searchsorted(firsts, rows, side="right") - 1
        blocks, places = np.divmod(rows - firsts[phases], BLOCK)
        for phase, block in sorted(set(zip(phases.tolist(), blocks.tolist(), strict=True))):
            mine = (phases == phase) & (blocks == block)
            table, before = self._block(phase, block)
            base = self.counts(int(firsts[phase]) + block * BLOCK)
            sources[mine] = table[places[mine]]
            numbers[mine] = base[sources[mine]] + before[places[mine]]
        return sources, numbers

    def counts(self, row: int) -> np.ndarray:
        """The number of rows of each source among the first `row` rows of a run."""
        total = np.zeros(len(self.orders), np.int64)
        for number, (first, share) in enumerate(self.phases):
            last = self.phases[number + 1][0] if number + 1 < len(self.phases) else row
            block, at = divmod(min(last, row) - first, BLOCK)
            if block < 0:
                break
            total += block * share
            total += np.bincount(self._block(number, block)[0][:at], minlength=len(share))
        return total

    def _block(self, phase: int, block: int) -> Block:
        """The source of each row of a block, and how many rows of that source came before it in the block."""
        if (phase, block) not in self._blocks:
            while len(self._blocks) > 8:
                del self._blocks[next(iter(self._blocks))]
            table = np.repeat(np.arange(len(self.orders)), self.phases[phase][1])
            table = np.random.default_rng([self.seed, phase, block]).permutation(table)
            before = np.empty_like(table)
            for source in range(len(self.orders)):
                before[table == source] = np.arange((table == source).sum())
            self._blocks[phase, block] = (table, before)
        return self._blocks[phase, block]
