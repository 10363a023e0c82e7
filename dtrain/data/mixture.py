"""A mixture of sources of tokens: each row of a batch comes from one of them, in proportion to their weights."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from dtrain.core.errors import DataError, FieldError, Problem
from dtrain.core.types import NonNegative, Positive
from dtrain.data.batch import DOCUMENT, POSITION, SOURCE, TARGET, TOKEN, Batch, Example, Feature
from dtrain.data.chat import Chat
from dtrain.data.data_check import DataCheck
from dtrain.data.order import Order, hash64
from dtrain.data.source import Load, Source, SourceDefaults, Split, Unaugmented
from dtrain.data.text import Text
from dtrain.data.tokenise import FileGroup, Tokenised
from dtrain.data.tokenizer import Tokenizer
from dtrain.data.tokens import Tokens
from dtrain.data.windows import row_example

OF_DATA = re.compile(r"^data\b")
BLOCK = 1000
"""Rows in which every source has exactly its share: weights are rounded to a thousandth."""
Block = tuple[np.ndarray, np.ndarray]
"""The source of each row, and how many rows of that source came before it in the block."""


def shares(weights: Sequence[float], names: Sequence[str], field: str = "sources") -> np.ndarray:
    """The rows of each source in a block: proportional to the weights, by largest remainder. FieldError of `field`, the
    key of the weights, if a source with a weight has no row, or if all weights are 0."""
    total = sum(weights)
    if total <= 0:
        raise FieldError(field, "all weights are 0")
    exact = np.array(weights) * BLOCK / total
    rows = np.floor(exact).astype(np.int64)
    for number in np.argsort(rows - exact, kind="stable")[: BLOCK - rows.sum()]:
        rows[number] += 1
    for name, weight, count in zip(names, weights, rows.tolist(), strict=True):
        if weight > 0 and count == 0:
            raise FieldError(field, f"{name} has less than a thousandth of the weights; give it more, or 0")
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
            base = self._counts(int(firsts[phase]) + block * BLOCK)
            sources[mine] = table[places[mine]]
            numbers[mine] = base[sources[mine]] + before[places[mine]]
        return sources, numbers

    def rows_of_parts(self, row: int) -> dict[str, int]:
        """The number of rows of each source among the first `row` rows of a run."""
        return dict(zip(self.names, self._counts(row).tolist(), strict=True))

    def _counts(self, row: int) -> np.ndarray:
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


Part = Text | Tokens | Chat


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """One source of a mixture."""

    name: str
    """Its name in metrics."""
    weight: NonNegative = 1.0
    """Its share of the rows is its weight divided by the sum of all."""
    data: Part
    """What the source is: a `data` section of its own."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Other weights, from a step on."""

    step: Positive
    """The first step with these weights."""
    weights: dict[str, NonNegative]
    """The weight of every source, by name."""


@dataclass(frozen=True, kw_only=True)
class Mixture(Unaugmented):
    """Rows from several sources, in proportion to their weights."""

    keeps: ClassVar[str] = "tokens"
    kind: Literal["mixture"] = "mixture"
    sources: tuple[Weighted, ...]
    """The sources: [{name: web, weight: 0.7, data: {kind: tokens, ...}}, ...]."""
    changes: tuple[Change, ...] = ()
    """Changes of the weights: [{step: 1000, weights: {web: 0.2, chat: 0.8}}]."""
    load: Load = field(default_factory=Load)

    def __post_init__(self) -> None:
        names = [part.name for part in self.sources]
        if len(names) < 2 or len(set(names)) < len(names):
            raise FieldError("sources", f"needs at least two sources with different names; found {', '.join(names)}")
        if len({part.data.length for part in self.sources}) > 1:
            found = ", ".join(f"{part.name} {part.data.length}" for part in self.sources)
            raise FieldError("sources", f"all need the same length; found {found}")
        last = 0
        for number, change in enumerate(self.changes):
            if change.weights.keys() != set(names):
                raise FieldError(f"changes.{number}.weights", f"needs a weight for each of {', '.join(names)}")
            if change.step <= last:
                raise FieldError(f"changes.{number}.step", f"step {change.step} is not after {last}")
            last = change.step
        for number, (_, weights) in enumerate(self.phases(1)):
            shares(weights, names, f"changes.{number - 1}.weights" if number else "sources")
        for number, part in enumerate(self.sources):
            if part.data.load != Load():
                hint = "set data.load of the mixture, which reads all its sources"
                raise FieldError(f"sources.{number}.data.load", "the settings of one source are not used", hint)

    @property
    def token_bytes(self) -> int:
        return max(part.data.token_bytes for part in self.sources)

    @property
    def packages(self) -> tuple[str, ...]:
        return tuple(name for part in self.sources for name in part.data.packages)

    def too_narrow(self, vocab: int) -> Iterator[tuple[str, str]]:
        for number, part in enumerate(self.sources):
            yield from ((f"sources.{number}.data.{key}", why) for key, why in part.data.too_narrow(vocab))

    def problems(self, recipe: Any, example: Example) -> Iterator[Problem]:
        if recipe.epochs:
            yield "epochs", "the sources of a mixture have epochs of different lengths", "give steps instead"
        for number, part in enumerate(self.sources):
            for key, message, hint in part.data.problems(recipe, example):
                yield OF_DATA.sub(f"data.sources.{number}.data", key), message, hint

    def phases(self, batch: int) -> list[tuple[int, list[float]]]:
        """The first row of each phase of constant weights, and the weights."""
        first = [(0, [part.weight for part in self.sources])]
        return first + [
            (change.step * batch, [change.weights[part.name] for part in self.sources]) for change in self.changes
        ]

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.sources[0].data.length

    @property
    def main(self) -> Part:
        """The first source of conversations, or the first one."""
        return next((part.data for part in self.sources if part.data.conversational), self.sources[0].data)

    @property
    def tokenized(self) -> bool:
        return True

    @property
    def tokenizer(self) -> str | None:
        """That of its sources; None if they have different ones, or none."""
        names = {part.data.tokenizer for part in self.sources if part.data.tokenizer}
        return names.pop() if len(names) == 1 else None

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer; DataError if the sources have different ones, or none."""
        tokenizers = [part.data.open_tokenizer() for part in self.sources if part.data.tokenizer]
        if not tokenizers:
            return self.main.open_tokenizer()  # raises
        if len({tokenizer.key for tokenizer in tokenizers}) > 1:
            raise DataError("the sources have different tokenizers", "give all the same data.tokenizer")
        return tokenizers[0]

    def example(self) -> Example:
        packed = any(DOCUMENT in part.data.example() for part in self.sources)
        return {**row_example(self.length, packed), SOURCE: Feature((len(self.sources),), "int32")}

    def in_order(self) -> "Mixture":
        """The same, with no row at a random position."""
        return replace(self, sources=tuple(replace(part, data=part.data.in_order()) for part in self.sources))

    def tokenises(self) -> Iterator[Tokenised]:
        return (one for part in self.sources for one in part.data.tokenises())

    def without_cache(self) -> "Mixture":
        return replace(self, sources=tuple(replace(part, data=part.data.without_cache()) for part in self.sources))

    def inspect(self, check: DataCheck) -> None:
        found: dict[Split, list[Example]] = {}
        for number, source in enumerate(self.sources):
            inner, key = DataCheck(), f"data.sources.{number}.data"
            source.data.inspect(inner)
            check.problems += [(OF_DATA.sub(key, path), problem) for path, problem in inner.problems]
            check.not_checked += [f"source {source.name}: {text}" for text in inner.not_checked]
            check.opened |= inner.opened
            for split, example in inner.examples.items():
                found.setdefault(split, []).append(example)
        check.examples["train"] = self.example()
        check.examples |= {
            split: self.with_largest_token(examples)
            for split, examples in found.items()
            if len(examples) == len(self.sources)
        }

    def with_largest_token(self, examples: Sequence[Example]) -> Example:
        """The features of a row of any of the sources with these examples."""
        largest = max((example[TOKEN] for example in examples), key=lambda token: token.values or 0)
        packed = any(DOCUMENT in example for example in examples)
        return {**self.example(), **row_example(self.length, packed, largest.values, largest.origin)}

    def file_groups(self, split: Split) -> list[FileGroup]:
        """What `data prepare` can make ahead."""
        return [group for part in self.sources for group in part.data.file_groups(split)]

    def open(self, split: Split) -> "MixtureSource":
        parts = {}
        for part in self.sources:
            try:
                parts[part.name] = part.data.open(split)
            except DataError as error:
                raise DataError(f"source {part.name}: {error.message}", error.hint) from error
        return MixtureSource(self, parts, DOCUMENT in self.example())


@dataclass(frozen=True)
class MixtureSource(SourceDefaults):
    """The examples of all sources, one source after the other."""

    mixture: Mixture
    sources: Mapping[str, Source]
    packed: bool
    """Whether rows have documents and positions."""

    @property
    def example(self) -> Example:
        return self.mixture.with_largest_token([source.example for source in self.sources.values()])

    @property
    def fingerprint(self) -> str:
        found = "\n".join(f"{name} {part.fingerprint}" for name, part in self.sources.items())
        return f"mixture:{hashlib.sha256(found.encode()).hexdigest()[:16]}"

    @property
    def notes(self) -> list[str]:
        notes = {name: source.notes or [f"{len(source):,} rows"] for name, source in self.sources.items()}
        return [f"{name}: {line}" for name, lines in notes.items() for line in lines]

    @cached_property
    def _offsets(self) -> np.ndarray:
        """The first index of each source, and the number of indices: start positions of random rows count, too."""
        return np.cumsum([0, *(part.random_starts or len(part) for part in self.sources.values())])

    def order(self, seed: int, batch: int) -> "MixedOrder":
        parts = list(self.sources.values())
        orders = [
            Order(len(part), int(hash64(np.uint64(seed) + np.uint64(number))) % 2**32, part.random_starts)
            for number, part in enumerate(parts)
        ]
        names = list(self.sources)
        phases = tuple((first, shares(weights, names)) for first, weights in self.mixture.phases(batch))
        return MixedOrder(tuple(names), tuple(orders), self._offsets, phases, seed)

    def __len__(self) -> int:
        return sum(len(part) for part in self.sources.values())

    def rows(self, indices: np.ndarray) -> Batch:
        of = np.searchsorted(self._offsets, indices, side="right") - 1
        batch: dict[str, Any] = {}
        for number, part in enumerate(self.sources.values()):
            mine = np.nonzero(of == number)[0]
            if len(mine):
                for name, values in self.complete(part.rows(indices[mine] - self._offsets[number]), number).items():
                    batch.setdefault(name, np.zeros((len(indices), *values.shape[1:]), values.dtype))[mine] = values
        return batch

    def complete(self, rows: Batch, number: int) -> Batch:
        """Rows of that source with their source, and the features that rows of several documents have."""
        source = np.zeros((len(rows[TOKEN]), len(self.sources)), np.int32)
        source[:, number] = 1
        rows = {name: rows[name] for name in (TOKEN, TARGET, DOCUMENT, POSITION) if name in rows} | {SOURCE: source}
        if not self.packed or DOCUMENT in rows:
            return rows
        position = np.broadcast_to(np.arange(rows[TOKEN].shape[1], dtype=np.int32), rows[TOKEN].shape)
        return {**rows, DOCUMENT: np.zeros_like(rows[TOKEN]), POSITION: position}

    def place(self, index: int) -> str:
        number = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return list(self.sources.values())[number].place(index - int(self._offsets[number]))

    def parts(self) -> "dict[str, Source]":
        return {name: SourceOfMixture(self, name) for name in self.sources}

    def changed(self) -> str:
        return next(filter(None, (part.changed() for part in self.sources.values())), "")


@dataclass(frozen=True)
class SourceOfMixture(SourceDefaults):
    """One source of a mixture, with the features of all."""

    whole: MixtureSource
    name: str

    @property
    def random_starts(self) -> int | None:
        return self.whole.sources[self.name].random_starts

    @property
    def example(self) -> Example:
        return self.whole.example

    @property
    def fingerprint(self) -> str:
        return self.whole.sources[self.name].fingerprint

    @property
    def bytes_per_token(self) -> float | None:
        return self.whole.sources[self.name].bytes_per_token

    @property
    def content_hashes(self) -> np.ndarray | None:
        return self.whole.sources[self.name].content_hashes

    def __len__(self) -> int:
        return len(self.whole.sources[self.name])

    def rows(self, indices: np.ndarray) -> Batch:
        rows = self.whole.sources[self.name].rows(indices)
        return self.whole.complete(rows, list(self.whole.sources).index(self.name))

    def place(self, index: int) -> str:
        return self.whole.sources[self.name].place(index)

    def changed(self) -> str:
        return self.whole.sources[self.name].changed()
