"""Whether held-out examples are also among those to train on, which makes their measures too good."""

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np

from dtrain.core.counts import counted
from dtrain.data.order import hash64
from dtrain.data.source import Source

AT_ONCE = 2**14
"""Rows that are hashed together."""


def hashes(contents: Iterable[bytes]) -> np.ndarray:
    """A number for each content, uint64 (contents,): equal for equal bytes."""
    digests = b"".join(blake2b(content, digest_size=8).digest() for content in contents)
    return np.frombuffer(digests, np.uint64)


def row_hashes(*arrays: np.ndarray) -> np.ndarray:
    """The hash of each row of arrays (rows, ...) of one length: the sum of the hashes of its words of 64 bits, each
    with its place, which numpy computes 35 times as fast as a digest of each row of a table."""
    total, words = np.zeros(len(arrays[0]), np.uint64), 0
    for values in arrays:
        flat = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
        padding = -flat.shape[1] % 8
        places = hash64(np.arange(words, words + (flat.shape[1] + padding) // 8, dtype=np.uint64))
        words += len(places)
        for first in range(0, len(flat), AT_ONCE):
            part = np.pad(flat[first : first + AT_ONCE], ((0, 0), (0, padding))).view(np.uint64)
            total[first : first + AT_ONCE] += hash64(part ^ places).sum(1, dtype=np.uint64)
    return total


def overlap(train: Source, test: Source) -> Iterator[str]:
    """How many held-out examples are among those to train on as well, a line for each part that has some; nothing of
    sources that do not know it."""
    known = [one.content_hashes for one in _leaves(train).values()]
    trained = np.concatenate([np.empty(0, np.uint64), *(some for some in known if some is not None)])
    for name, part in _leaves(test).items():
        own = part.content_hashes
        again = np.flatnonzero(np.isin([] if own is None else own, trained))
        if own is not None and len(again):
            place = part.place(int(again[0]))
            many = f"{len(again):,} of the {counted(len(own), 'held-out example')}"
            of = f"{name}: " if name else ""
            first = f"; the first: {place}" if place else ""
            yield f"{of}{many} {'is' if len(again) == 1 else 'are'} in the training data as well{first}"


def _leaves(source: Source) -> dict[str, Source]:
    """The parts of a source, or itself."""
    return {**source.parts()} or {"": source}
