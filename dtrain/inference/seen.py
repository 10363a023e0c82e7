"""What a run was trained on, and when. A batch is a function of the seed and its number alone: nothing is guessed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dtrain.checkpoint import manifest
from dtrain.core.errors import DataError, RecipeError
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.data.batch import DOCUMENT, LABEL, TARGET, TOKEN, Batch
from dtrain.data.order import RowOrder
from dtrain.data.prediction_inputs import named_tokenizer
from dtrain.data.source import Source
from dtrain.data.tokenizer import Tokenizer
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Recipe

CHUNK = 2**18
"""Rows whose examples are computed at once."""
READ = 256
"""Examples that are read at once to look for a text."""
ORDER = ("batch", "seed", "data")
"""Keys of a recipe that decide which examples a step has."""


@dataclass(frozen=True)
class Seen:
    """The examples of a run's steps."""

    recipe: Recipe
    source: Source
    steps: int
    """Steps of which the state of the run is made."""
    first: int
    """The first step whose examples are known: the recipe had another order before."""
    skips: Sequence[tuple[int, int]]
    """After each of these steps, how many batches the run was ahead: those that rollbacks skipped."""
    checked: bool
    """Whether the data was compared with that of a checkpoint."""

    @cached_property
    def order(self) -> RowOrder:
        return self.source.order(self.recipe.seed, self.recipe.batch)

    def rows(self, step: int) -> np.ndarray:
        """The numbers of the rows of a step (batch,), counted from the first row of the run."""
        return self._rows(np.asarray([step]))

    def _rows(self, steps: np.ndarray) -> np.ndarray:
        """The numbers of the rows of these steps, one step after the other (steps x batch,)."""
        ahead = np.zeros_like(steps)
        for after, skipped in self.skips:
            ahead[steps > after] = skipped
        return (((steps - 1 + ahead) * self.recipe.batch)[:, None] + np.arange(self.recipe.batch)).reshape(-1)

    def examples(self, step: int) -> np.ndarray:
        """The indices of the examples of a step (batch,); with random positions where they begin."""
        if not self.first <= step <= self.steps:
            known = f"{self.first:,} to {self.steps:,}" if self.first <= self.steps else "none"
            raise RecipeError(f"step {step:,}: the steps whose examples are known are {known}")
        return self.order(self.rows(step))

    @cached_property
    def _ends(self) -> dict[str, int]:
        """Behind the last number of each source of a mixture; of all examples, by "", of other data."""
        parts = self.source.parts() or {"": self.source}
        counts = [part.random_starts or len(part) for part in parts.values()]
        return dict(zip(parts, np.cumsum(counts).tolist(), strict=True))

    @property
    def numbers(self) -> int:
        """How many examples have a number: with random positions, each token begins one."""
        return max(self._ends.values())

    def source_of(self, index: int) -> str:
        """The source of a mixture that an example is of; empty for other data."""
        return next(name for name, end in self._ends.items() if index < end)

    def epoch(self, row: int) -> int | None:
        """The epoch of a row, from 1; None where rows have random positions, or come from several sources."""
        random = self.source.random_starts is not None or bool(self.source.parts())
        return None if random else row // len(self.source) + 1

    def steps_with(self, indices: np.ndarray) -> dict[int, list[int]]:
        """For each of these examples, the steps that had it, in order."""
        wanted, found = np.unique(indices), {int(index): list[int]() for index in indices}
        for steps, chosen in self._chunks():
            for step, index in zip(*_where(chosen, steps, wanted), strict=True):
                found[index].append(step)
        return found

    def _chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The steps and the examples of all rows that the run has trained on, in order."""
        each = max(1, CHUNK // self.recipe.batch)
        for begin in range(self.first, self.steps + 1, each):
            steps = np.arange(begin, min(begin + each, self.steps + 1))
            yield np.repeat(steps, self.recipe.batch), self.order(self._rows(steps))

    def indices(self) -> np.ndarray:
        """The examples that the run has trained on, each once, in the order of their numbers."""
        return np.unique(np.concatenate([np.unique(chosen) for _, chosen in self._chunks()] or [np.empty(0, int)]))

    def text(self, index: int, tokenizer: Tokenizer | None) -> str:
        """What an example says, each of its texts after what it is."""
        batch = self.source.rows(np.asarray([index]))
        return _written(_texts_of(self.source, index, {name: values[0] for name, values in batch.items()}, tokenizer))

    def with_text(
        self, text: str, tokenizer: Tokenizer | None, progress: Callable[[int, int], None]
    ) -> Iterator[tuple[int, str]]:
        """The examples that the run has trained on and that have this text, with what is around it. DataError if the
        data names no tokenizer that gives the text of its tokens."""
        if TOKEN in self.source.example and self.recipe.data.tokenized and not tokenizer:
            self.recipe.data.open_tokenizer()  # raises, with the keys that name one
        indices = self.indices()
        for begin in range(0, len(indices), READ):
            part = indices[begin : begin + READ]
            batch = self.source.rows(part)
            for number, index in enumerate(part.tolist()):
                row = {name: values[number] for name, values in batch.items()}
                for name, own in _texts_of(self.source, index, row, tokenizer):
                    if (at := own.find(text)) >= 0:
                        yield index, _written([(name, own[max(0, at - 24) : at + len(text) + 24])])
                        break
            progress(min(begin + READ, len(indices)), len(indices))


def _where(chosen: np.ndarray, steps: np.ndarray, wanted: np.ndarray) -> tuple[list[int], list[int]]:
    mine = np.isin(chosen, wanted)
    return steps[mine].tolist(), chosen[mine].tolist()


def _texts_of(source: Source, index: int, row: Batch, tokenizer: Tokenizer | None) -> Iterator[tuple[str, str]]:
    """The texts of an example: of its tokens with the last target, of its columns, its file and its class. Before each
    what it is: documents that have names are texts of their own; empty for others."""
    if TOKEN in row:
        document, names = np.asarray(row.get(DOCUMENT, np.zeros_like(row[TOKEN]))), source.names_of(DOCUMENT)
        for number, name in enumerate(names or [""]):
            inside = document == number if names else np.ones_like(document, bool)
            # empty slots have the number after the row's last document, and nothing to learn
            if inside.any() and not (names and (np.asarray(row[TARGET])[inside] < 0).all()):
                yield name, _text(row, inside, tokenizer)
    for name, values in row.items():
        if (written := source.text_of(name, np.asarray(values))) is not None:
            yield "", written
    yield "", source.place(index)
    if LABEL in row and not np.ndim(row[LABEL]):
        label = row[LABEL].item()
        yield "", source.class_names[label] if source.class_names else f"label {label:g}"


def _written(texts: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {text}" if name else text for name, text in texts if text)


def _text(row: Batch, inside: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """The text of these tokens of a row and of the last target; without a tokenizer, numbers."""
    tokens, targets = np.asarray(row[TOKEN])[inside].tolist(), np.asarray(row.get(TARGET, row[TOKEN]))[inside].tolist()
    last = targets[-1:] if TARGET in row and targets[-1] >= 0 else []
    return tokenizer.decode([*tokens, *last]) if tokenizer else " ".join(map(str, tokens))


def seen(run_dir: Folder, unsaved: bool = False) -> tuple[Seen, Tokenizer | None]:
    """Open the data of a run as it trains on it, and its tokenizer. `unsaved`: also of one that has saved no step.

    DataError if the data is not that of the run's newest checkpoint. RecipeError if it has trained on nothing.
    """
    recipe, record = load(run_dir.recipe), run_dir.read_record()
    saved = saved_steps(run_dir.checkpoints)
    steps = max([record.get("step", 0), *saved[:1]])
    if not (steps or unsaved):
        raise RecipeError(f"{run_dir.path} has saved no step yet", "train it first: dtrain run")
    source = recipe.data.open("train")
    was = _fingerprint(run_dir, saved)
    if was and was != source.fingerprint:
        raise DataError(f"the data is not what {run_dir.path} was trained on", "restore the files that it had")
    changes = [change for change in record.get("changes", ()) if any(map(_orders, change.get("recipe", ())))]
    first = max([0, *(int(change["step"]) for change in changes)]) + 1
    skips = [(skip["step"], skip["batches_skipped"]) for skip in record.get("skips", ())]
    if record.get("rollbacks") and not skips:
        raise RecipeError(f"{run_dir.path} was rolled back by a version that did not record which batches it skipped")
    tokenizer = named_tokenizer(recipe.data, source)
    return Seen(recipe, source, steps, first, skips, checked=bool(was)), tokenizer


def _fingerprint(run_dir: Folder, saved: Sequence[int]) -> str:
    """That of the data of the newest checkpoint that can be read; empty if there is none."""
    for step in saved:
        with suppress(manifest.CorruptCheckpoint, OSError):
            return str(manifest.read(Path(run_dir.checkpoints) / str(step)).conditions.get("data", ""))
    return ""


def _orders(line: str) -> bool:
    """Whether a line about a changed key is of one that decides the examples of a step."""
    return line.partition(":")[0].partition(".")[0] in ORDER
