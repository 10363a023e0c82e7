"""Rows of several documents each, cut from tokenised records in the cache."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dtrain.core.account import Account, account_of
from dtrain.core.counts import counted
from dtrain.core.errors import DataError
from dtrain.data.batch import DOCUMENT, POSITION, TARGET, TOKEN, Batch, Example
from dtrain.data.order import hash64, permuted
from dtrain.data.overlap import hashes
from dtrain.data.source import SourceDefaults, Split
from dtrain.data.stream import InMemory, Part, Stream
from dtrain.data.windows import NO_TARGET, row_example


def packed(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """The documents in each row: best fit decreasing (Johnson 1973), which depends on the sizes alone.

    The largest documents come first; each goes into the fullest row that has room for it. No size exceeds `capacity`.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    """The rows with exactly this many free slots."""
    occupied = 0  # bit i is set if a row has i free slots
    for document in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        size = sizes[document]
        fitting = occupied >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1  # the lowest set bit: the least room that suffices
            row = with_room[room].pop()
            if not with_room[room]:
                occupied ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(document)
        with_room[room - size].append(row)
        occupied |= 1 << (room - size)
    return rows


TARGET_BIT = np.uint32(1 << 31)
"""The bit of a cached token that is set if the token is a target."""
COUNTED = ("documents", "empty", "too_long")
"""The first numbers of the cache, each as millions and the rest: documents; records that are empty or too long."""
MILLION = 10**6
FIRST = 2 * len(COUNTED)
"""Where the cache has the tokens of each document, then the bytes of text of each; the tokens themselves follow."""
LEFT_OUT = {"empty": "empty or without a target", "too_long": "longer than a row"}
"""Counts of records that are not used as they are, as text."""


IGNORED, UNKNOWN, MESSAGE, ROLE, TURN, ANSWER, TEXT = (
    "ignored", "unknown", "message", "role", "turn", "answer", "text"
)  # fmt: skip
"""The kinds of the account of records: their fields, those of messages, roles, marked turns, ends of answers, and what
plain texts get."""


def account_lines(account: Account) -> list[str]:
    """What the records have, and what of them is not used."""
    lines = []
    if account.of(ROLE):
        turns = ", ".join(f"{count:,} of {role}" for role, count in account.of(ROLE).items())
        marked = "".join(f"; {count:,} {what}" for what, count in account.of(TURN).items())
        lines.append(f"messages: {turns}{marked}")
    lines += [f"answers {what} ({count:,})" for what, count in account.of(ANSWER).items()]
    lines += [f"plain texts: {what} ({count:,})" for what, count in account.of(TEXT).items()]
    return lines + unused_lines(account)


def unused_lines(account: Account) -> list[str]:
    """What of the records is not used."""
    lines = []
    if account.of(UNKNOWN):
        lines.append(f"fields of records that are not used: {account.named(UNKNOWN)}")
    if account.of(MESSAGE):
        lines.append(f"fields of messages that the template does not use: {account.named(MESSAGE)}")
    if account.of(IGNORED):
        lines.append(f"fields of records that change nothing: {account.named(IGNORED)}")
    return lines


class Document(NamedTuple):
    """A tokenised document: uint32, with TARGET_BIT, and the bytes of text that its targets stand for."""

    tokens: np.ndarray
    size: float = 0


def content(documents: Sequence[Document], counts: Mapping[str, int], account: Account) -> Iterator[Part]:
    """The content of the cache, uint32: COUNTED, tokens and bytes of each document, then all tokens with TARGET_BIT;
    and the account of the records, which the cache keeps beside it."""
    values = {**counts, "documents": len(documents)}
    yield np.array([part for name in COUNTED for part in divmod(values[name], MILLION)], np.uint32)
    yield np.array([len(document.tokens) for document in documents], np.uint32)
    yield np.rint([document.size for document in documents]).astype(np.uint32)
    yield from (document.tokens for document in documents)
    yield account.values()


def joined(parts: Sequence[Stream]) -> Iterator[Part]:
    """The content of one cache with the documents of several, in their order."""
    totals = [_counts(part.tokens) for part in parts]
    counts = {name: sum(own_counts[name] for own_counts in totals) for name in COUNTED}
    yield np.array([part for name in COUNTED for part in divmod(counts[name], MILLION)], np.uint32)
    for number in (0, 1, 2):  # the tokens of each document, the bytes of each, all tokens
        for part, own_counts in zip(parts, totals, strict=True):
            begin, count = FIRST + number * own_counts["documents"], own_counts["documents"]
            yield part.tokens[begin : begin + count] if number < 2 else part.tokens[begin:]
    yield account_of(part.account for part in parts).values()


def _counts(content: np.ndarray) -> dict[str, int]:
    """The counts at the begin of a cache, by name."""
    values = content[:FIRST].astype(np.int64).reshape(-1, 2) @ np.array([MILLION, 1])
    return dict(zip(COUNTED, values.tolist(), strict=True))


@dataclass(frozen=True)
class Documents:
    """Tokenised records in the cache."""

    stream: Stream | InMemory
    digest: str
    origin: str

    @cached_property
    def counts(self) -> dict[str, int]:
        """The counts by name."""
        return _counts(self.stream.tokens)

    def rows_of(
        self, split: Split, test: float, length: int, per_row: int | None, *, numbered: bool = False
    ) -> "Packed":
        """The rows of a split, each of so many consecutive documents, or, with None, of as many as fit.

        `test`: the fraction held out, 1 if all are. `numbered`: the cache has the number of the first document of each
        row in place of bytes of text. DataError if the split has no document.
        """
        unit = per_row or 1
        count = self.counts["documents"] // unit
        every = self.counts["documents"]
        sizes, texts = (self.stream.tokens[FIRST + i * every :][: count * unit].astype(np.int64) for i in (0, 1))
        held = round(test * count)
        held = min(max(held, 1), count - 1) if 0 < test < 1 and count > 1 else held
        chosen = np.sort(permuted(np.arange(held), count, hash64(np.uint64(0)))) if held else np.arange(0)
        content = self._content_hashes(unit, 1 if numbered else unit)
        alike = np.flatnonzero(np.isin(content, content[chosen]))  # a copy of a held-out record is held out as well
        grown, chosen = (len(alike) - held, alike) if len(alike) < count else (0, chosen)
        own = chosen if split == "test" else np.setdiff1d(np.arange(count), chosen)
        if not len(own):
            found = [f"{count:,} usable records"]
            found += [f"{self.counts[name]:,} {what}" for name, what in LEFT_OUT.items() if self.counts[name]]
            hint = "raise data.length, or use more records" if self.counts["too_long"] else "use more records"
            hint += ": a row has both answers of a pair" if unit > 1 and self.counts["too_long"] else ""
            hint = "set data.test, or data.test_files" if split == "test" and not test else hint
            raise DataError(f"{self.origin}: no record for the {split} split: {', '.join(found)}", hint)
        first = FIRST + 2 * every
        starts = first + np.cumsum(sizes) - sizes
        if per_row is None:
            rows = [[int(own[document]) for document in row] for row in packed((sizes[own] - 1).tolist(), length)]
        else:
            rows = [list(range(one * unit, (one + 1) * unit)) for one in own.tolist()]
        flat = np.array([document for row in rows for document in row], np.int64)
        bounds = np.cumsum([0, *map(len, rows)])
        largest = int((self.stream.tokens[first:] & ~TARGET_BIT).max(initial=0))
        digest = f"chat:{split}:{test}:{length}:{per_row}:{self.digest[:16]}{f':{grown} copies' if grown else ''}"
        whole = Packed(self, length, starts[flat], sizes[flat], bounds, largest, digest, len(own), hashed=content[own])
        if numbered:
            return replace(whole, first=texts[flat[bounds[:-1]]])
        return replace(whole, text=int(texts[flat].sum()))

    def _content_hashes(self, unit: int, own: int) -> np.ndarray:
        """The hash of each record, uint64 (records,), which is so many documents, of which the first `own` are its."""
        tokens, count = self.stream.tokens, self.counts["documents"]
        ends = FIRST + 2 * count + np.cumsum([0, *tokens[FIRST:][:count].astype(np.int64).tolist()])
        begins, last = ends[:-1:unit].tolist(), ends[own::unit].tolist()
        return hashes(tokens[begin:end].tobytes() for begin, end in zip(begins, last, strict=True))


@dataclass(frozen=True)
class Packed(SourceDefaults):
    """A source of rows, each of one or several documents."""

    documents: Documents
    length: int
    starts: np.ndarray
    """Where each document begins in the cache, in the order of the rows."""
    sizes: np.ndarray
    """Tokens of each document."""
    bounds: np.ndarray
    """The first document of each row, and the number of documents."""
    largest: int
    fingerprint: str
    records: int
    named: tuple[str, ...] = ()
    """What each document of a row is, by its number, where the loss is not that of predicting texts."""
    text: int = 0
    """Bytes of text of the documents that count in the loss."""
    first: np.ndarray | None = None
    """The number of the first document of each row; by default 0."""
    hashed: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64), compare=False, repr=False)
    """The hash of each record."""

    @property
    def content_hashes(self) -> np.ndarray | None:
        return self.hashed

    @property
    def example(self) -> Example:
        return row_example(self.length, True, self.largest + 1, self.documents.origin)

    def names_of(self, feature: str) -> tuple[str, ...]:
        return self.named if feature == DOCUMENT else ()

    @property
    def filled(self) -> float:
        """The fraction of the slots that have a token."""
        return float((self.sizes - 1).sum()) / (len(self) * self.length)

    @property
    def bytes_per_token(self) -> float | None:
        return self._bytes_per_token

    @cached_property
    def _bytes_per_token(self) -> float | None:
        """Bytes of text for each token that counts in the loss; end tokens count there and have no text."""
        if self.named:  # no bits per byte
            return None
        learned = self.documents.stream.tokens >= TARGET_BIT
        targets = sum(
            int(learned[begin + 1 : begin + size].sum()) for begin, size in zip(self.starts, self.sizes, strict=True)
        )
        return self.text / max(targets, 1)

    @property
    def notes(self) -> list[str]:
        distinct = len(np.unique(self.hashed))
        again = [f"{counted(distinct, 'distinct record')}, the others are copies"] if distinct < self.records else []
        return [self._filling, *again, *account_lines(account_of([self.documents.stream.account]))]

    @property
    def _filling(self) -> str:
        records = f"{counted(self.records, 'record')}"
        rows = f"{records} in {counted(len(self), 'row')} of {self.length:,} tokens"
        rows += f", {self.filled:.1%} filled"
        own_counts = self.documents.counts
        counts = [f"{own_counts[name]:,} {what}" for name, what in LEFT_OUT.items() if own_counts[name]]
        return rows + (f"; of the files' records {' and '.join(counts)}" if counts else "")

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def rows(self, indices: np.ndarray) -> Batch:
        self.documents.stream.check()
        shape, cache = (len(indices), self.length), self.documents.stream.tokens
        batch: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in (TOKEN, DOCUMENT, POSITION)}
        batch[TARGET] = np.full(shape, NO_TARGET, np.int32)
        for row, index in enumerate(indices.tolist()):
            at, documents = 0, range(self.bounds[index], self.bounds[index + 1])
            first = 0 if self.first is None else int(self.first[index])
            for number, document in enumerate(documents, first):
                begin, size = int(self.starts[document]), int(self.sizes[document])
                with_bits, slots = cache[begin : begin + size], slice(at, at + size - 1)
                tokens = (with_bits & ~TARGET_BIT).astype(np.int32)
                batch[TOKEN][row, slots] = tokens[:-1]
                batch[TARGET][row, slots] = np.where(with_bits[1:] & TARGET_BIT, tokens[1:], NO_TARGET)
                batch[DOCUMENT][row, slots] = number
                batch[POSITION][row, slots] = np.arange(size - 1)
                at += size - 1
            batch[DOCUMENT][row, at:] = first + len(documents)  # empty slots attend to each other alone
            batch[POSITION][row, at:] = np.arange(self.length - at)
        return batch

    def changed(self) -> str:
        return self.documents.stream.changed()


def targets_in(tokens: np.ndarray) -> int:
    """How many tokens of a document count in the loss; its first one is no target."""
    return int((tokens[1:] >= TARGET_BIT).sum())
