"""The example of each row of a run, as a function of the seed and the row number alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

SMALL = 2**22
"""Maximum number of examples whose permutation is held in memory; for more, it is computed per row."""
ROUNDS = 6
"""Rounds of the Feistel network."""


class RowOrder(Protocol):
    """The index of the example of each row of a run."""

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The indices (rows,) for these row numbers (rows,)."""
        ...

    def rows_of_parts(self, row: int) -> Mapping[str, int]:
        """How many of the first `row` rows come from each of the source's parts."""
        ...


@dataclass(frozen=True)
class Order:
    """Sampling order: a new permutation of the `examples` in every epoch, from (seed, epoch).

    With `random_starts`, instead, each row has a random start position below it, sampled with replacement.
    """

    examples: int
    seed: int
    random_starts: int | None = None
    _permutations: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The index of the example, or the start position, of each row."""
        if self.random_starts is not None:
            keyed = hash64(np.uint64(self.seed) + hash64(rows.astype(np.uint64)))
            return (keyed % np.uint64(self.random_starts)).astype(np.int64)
        epochs, positions = rows // self.examples, rows % self.examples
        if epochs[0] == epochs[-1]:
            return self._permuted(int(epochs[0]), positions)
        indices = np.empty_like(rows)
        for epoch in np.unique(epochs):
            indices[epochs == epoch] = self._permuted(int(epoch), positions[epochs == epoch])
        return indices

    def _permuted(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        if self.examples > SMALL:
            return permuted(positions, self.examples, hash64(hash64(np.uint64(self.seed)) + np.uint64(epoch)))
        if epoch not in self._permutations:
            for old in [cached for cached in self._permutations if cached < epoch - 1]:
                del self._permutations[old]
            self._permutations[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.examples)
        return self._permutations[epoch][positions]

    def rows_of_parts(self, row: int) -> dict[str, int]:
        """None: the examples are those of one source."""
        del row
        return {}


def permuted(places: np.ndarray, count: int, key: Any) -> np.ndarray:
    """Map positions 0 to `count` - 1 by a pseudorandom permutation that depends on `key`, without a table in memory.

    A Feistel network permutes the numbers of the smallest even number of bits that covers `count`. A result of `count`
    or more is permuted again until it is in range (cycle walking; Black & Rogaway 2002, "Ciphers with Arbitrary Finite
    Domains").
    """
    half = np.uint64(((count - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (hash64(right ^ hash64(key + np.uint64(number))) & mask)
        values[outside] = (left << half) | right
        outside = values >= count
    return values.astype(np.int64)


def hash64(x: Any) -> Any:
    """Hash of each 64-bit number: SplitMix64 (Steele et al. 2014) without its first xor-shift."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
