"""Which example each row of a run draws: a function of the seed and the row's number alone."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SMALL = 2**22
"""Up to so many examples a permutation is kept in memory; beyond, it is computed row by row."""
ROUNDS = 6


@dataclass(frozen=True)
class Order:
    """Every epoch a new permutation of `examples`, drawn from (seed, epoch); or, where examples may
    begin at any of `starts` places, one of those at random for each row."""

    examples: int
    seed: int
    starts: int | None = None
    _drawn: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The example, or the start, that each row draws."""
        if self.starts is not None:
            keyed = mixed(np.uint64(self.seed) + mixed(rows.astype(np.uint64)))
            return (keyed % np.uint64(self.starts)).astype(np.int64)
        epochs, places = rows // self.examples, rows % self.examples
        if epochs[0] == epochs[-1]:
            return self._permuted(int(epochs[0]), places)
        found = np.empty_like(rows)
        for epoch in np.unique(epochs):
            found[epochs == epoch] = self._permuted(int(epoch), places[epochs == epoch])
        return found

    def _permuted(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if self.examples > SMALL:
            return permuted(places, self.examples, mixed(mixed(np.uint64(self.seed)) + np.uint64(epoch)))
        if epoch not in self._drawn:
            for old in [known for known in self._drawn if known < epoch - 1]:
                del self._drawn[old]
            self._drawn[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.examples)
        return self._drawn[epoch][places]


def permuted(places: np.ndarray, count: int, key: Any) -> np.ndarray:
    """Each place of `count` under a permutation drawn from the key, with no table in memory.

    A Feistel network on the smallest even number of bits that holds them all, walked on until
    inside (Black & Rogaway 2002).
    """
    half = np.uint64(((count - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    found = places.astype(np.uint64)
    outside = np.ones(len(found), bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (mixed(right ^ mixed(key + np.uint64(number))) & mask)
        found[outside] = (left << half) | right
        outside = found >= count
    return found.astype(np.int64)


def mixed(x: Any) -> Any:
    """A well-mixed 64-bit number for each (the finaliser of SplitMix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
