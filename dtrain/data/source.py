"""The interfaces of data: the recipe's `data` section, and the sources of examples that it opens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self

import jax
import numpy as np
from annotated_types import Ge, Le

from dtrain.core.errors import Problem, RecipeError
from dtrain.core.types import Answers, JsonObject
from dtrain.data.batch import TOKEN, Batch, Example, Preparation
from dtrain.data.order import Order, RowOrder

if TYPE_CHECKING:
    from pathlib import Path

    from dtrain.data.data_check import DataCheck
    from dtrain.data.guess import Guess
    from dtrain.data.tokenise import FileGroup, Tokenised

Split = Literal["train", "test"]
Readers = Annotated[int, Ge(0), Le(1024)]
CHANGED = "restore the original file and run the same command again; for other data, use another run name: name=..."


@dataclass(frozen=True, kw_only=True)
class Load:
    """Prefetching of examples. These settings do not change which examples a batch contains."""

    prefetch: Readers | None = None
    """Number of batches that a thread prefetches; default 2, or 0 if the examples are in memory."""
    workers: Readers = 0
    """Number of worker processes that read; useful if reading a batch takes more than about 1 ms. Ignored if the
    examples are in memory."""


class Source(Protocol):
    """Examples that are accessed by index; `SourceDefaults` has what most sources answer."""

    @property
    def example(self) -> Example:
        """Shape and dtype of each feature."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of the examples, which changes whenever they change."""
        ...

    @property
    def random_starts(self) -> int | None:
        """Number of start positions for random sampling; None if every epoch is a permutation of the examples."""
        ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, by label; empty if they have none."""
        ...

    @property
    def row_labels(self) -> np.ndarray | None:
        """The class of each example, int32 (examples,); None if it is not known without reading them."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What a user should know about how files became examples, a line each."""
        ...

    def names_of(self, feature: str) -> tuple[str, ...]:
        """The names of a feature's values, of `features` by their place, of `document` by their number; empty if they
        have none."""
        ...

    @property
    def content_hashes(self) -> np.ndarray | None:
        """A hash of each example, of packed rows of each record, uint64; None if it takes reading files once more."""
        ...

    @property
    def fitted(self) -> JsonObject:
        """What reading the training examples computed, such as means; a run keeps it for `Data.with_fitted`."""
        ...

    def place(self, index: int) -> str:
        """The file that an example comes from, and where in it; empty if it is not of one."""
        ...

    def origin_of(self, index: int) -> JsonObject:
        """Where an example comes from, by name: its file, its record or its row, counted from 1 in the file and from 0
        in the split where no file is known; and what the file has of it beside what the model gets."""
        ...

    def text_of(self, name: str, row: np.ndarray) -> str | None:
        """The text that a feature of an example was made of; None if it was none, or is not known."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text for each token that counts in the loss: 0 if not known, None if the loss is not that of
        predicting texts."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether reading a row costs no more than a copy, so that nothing is gained by reading ahead."""
        ...

    def parts(self) -> "Mapping[str, Source]":
        """The sources that a mixture consists of, by name, each with the features of all; else none."""
        ...

    def order(self, seed: int, batch: int) -> RowOrder:
        """The example of each row of a run."""
        ...

    def __len__(self) -> int:
        """Number of examples in one epoch."""
        ...

    def rows(self, indices: np.ndarray) -> Batch:
        """The examples with these indices, (examples, ...), as host arrays. Pure: equal indices give equal rows.

        DataError if a file that they are read from changed after it was opened.
        """
        ...

    def changed(self) -> str:
        """Which file changed after it was opened, and how; empty if none did, or if no file is read any more."""
        ...


class Data(Protocol):
    """The recipe's `data` section, a frozen dataclass."""

    @property
    def kind(self) -> str:
        """The kind of data, as the recipe names it."""
        ...

    @property
    def load(self) -> Load:
        """Prefetching of the examples."""
        ...

    @property
    def needs_row_numbers(self) -> bool:
        """Whether `prepare` is random: then a batch has its global row numbers as feature `row`."""
        ...

    @property
    def needs_pairs(self) -> bool:
        """Whether `prepare` mixes an example with another: then a batch has that one's image and label, too."""
        ...

    def example(self) -> Example | None:
        """Shape and dtype of each feature; None if they are not known without reading the examples."""
        ...

    def open(self, split: Split) -> Source:
        """Open the examples of a split; DataError if there are none."""
        ...

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        """Prepare a batch on the device: scale it and, with `train`, augment it with random numbers from `key`."""
        ...

    @property
    def packages(self) -> tuple[str, ...]:
        """The optional packages that open it, by the names with which they are imported; see `core.extras`."""
        ...

    @property
    def pictures(self) -> Preparation | None:
        """How its pictures are prepared; None for data without pictures that it prepares."""
        ...

    @property
    def tokenized(self) -> bool:
        """Whether `open_tokenizer` gives the tokenizer of its texts."""
        ...

    def tokenises(self) -> "Iterator[Tokenised]":
        """The files for training whose texts become tokens when it is opened."""
        ...

    def too_narrow(self, vocab: int) -> Iterator[tuple[str, str]]:
        """Keys of this section whose format cannot hold the tokens of such a vocabulary, and why."""
        ...

    @property
    def reads_inputs(self) -> bool:
        """Whether `predict` can read examples of this form from files that a user names."""
        ...

    @property
    def user_code(self) -> str:
        """What the recipe names as code that runs when it is opened; empty for dtrain's own data."""
        ...

    @property
    def example_from_files(self) -> bool:
        """Whether `example` reads a file, which `check --no-data` does not."""
        ...

    def problems(self, recipe: Any, example: Example) -> Iterator[Problem]:
        """What of a recipe does not go with it; `example` is empty if it is not known."""
        ...

    def in_order(self) -> "Data":
        """The same data with each example once, in order: no rows at random positions."""
        ...

    def without_cache(self) -> "Data":
        """The same data, opened without writing into a cache."""
        ...

    def with_fitted(self, fitted: JsonObject) -> "Data":
        """The same data, read as examples were when a run computed this from those that it trained on."""
        ...

    def inspect(self, check: "DataCheck") -> None:
        """Find what is wrong with it before a run, as far as it is cheap: no code of a user is run, nothing is written
        or downloaded. DataError, OSError, ValueError and MemoryError may be left to the caller."""
        ...

    def open_tokenizer(self) -> Any:
        """The tokenizer of its texts. RecipeError if data of this kind has none, DataError if it is not there."""
        ...


class SourceDefaults:
    """What holds of a source that says nothing else: examples in a new order in every epoch, and no file is read."""

    @property
    def random_starts(self) -> int | None:
        return None

    @property
    def class_names(self) -> tuple[str, ...]:
        return ()

    @property
    def row_labels(self) -> np.ndarray | None:
        return None

    @property
    def notes(self) -> Sequence[str]:
        return ()

    def names_of(self, feature: str) -> tuple[str, ...]:
        del feature
        return ()

    @property
    def content_hashes(self) -> np.ndarray | None:
        return None

    @property
    def fitted(self) -> JsonObject:
        return {}

    def place(self, index: int) -> str:
        del index
        return ""

    def origin_of(self, index: int) -> JsonObject:
        return {"file": place} if (place := self.place(index)) else {"row": index}

    def text_of(self, name: str, row: np.ndarray) -> str | None:
        del name, row
        return None

    @property
    def bytes_per_token(self) -> float | None:
        return 0.0 if TOKEN in self.example else None  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def in_memory(self) -> bool:
        return False

    def parts(self) -> Mapping[str, Source]:
        return {}

    def order(self, seed: int, batch: int) -> RowOrder:
        del batch
        return Order(len(self), seed, self.random_starts)  # pyright: ignore[reportArgumentType]

    def changed(self) -> str:
        return ""


class DataDefaults:
    """What holds of data that says nothing else: one answer, no tokens, no tokenizer, no other package."""

    kind: Any
    """The kind of data, as the recipe names it."""
    keeps: ClassVar[str] = ""
    """What its cache keeps for later starts, as text; empty if it has none."""

    @classmethod
    def guesses(cls, path: "Path") -> "Iterator[Guess]":
        """How data of this kind would read a file or folder that a user has; none if it would not. DataError if it is
        of this kind, but cannot be used as it is."""
        del path
        return iter(())

    @property
    def answers(self) -> Answers:
        """What a row has for an objective that compares answers."""
        return ""

    @property
    def holds_out(self) -> bool:
        """Whether `test` is the share of its examples that is held out."""
        return "test" in getattr(self, "__dataclass_fields__", ())

    @property
    def held_share(self) -> float | None:
        """The share of its files that is held out; None if other files are, or if it is not known."""
        return getattr(self, "test", None) if getattr(self, "test_files", None) == () else None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in its files, which each host reads before the first step; 0 if its files are no tokens."""
        return 0

    @property
    def has_template(self) -> bool:
        """Whether conversations can be written with the chat template of the data or of its tokenizer."""
        return False

    @property
    def conversational(self) -> bool:
        """Whether its texts are conversations in a chat template."""
        return False

    @property
    def ends_texts(self) -> bool:
        """Whether a token ends each text."""
        return False

    @property
    def end_text(self) -> str:
        """The text of that token, if the data names one beside the tokenizer's."""
        return ""

    @property
    def main(self) -> Any:
        """The data whose tokenizer and chat template text is generated with: of a mixture, one of its sources."""
        return self

    @property
    def pictures(self) -> Preparation | None:
        """How its pictures are prepared; None: it has none that it prepares."""
        return None

    @property
    def tokenized(self) -> bool:
        """Whether `open_tokenizer` gives the tokenizer of its texts."""
        return False

    @property
    def packages(self) -> tuple[str, ...]:
        """The optional packages that open it, by the names with which they are imported; see `core.extras`."""
        return ()

    def open_tokenizer(self) -> Any:
        """The tokenizer of its texts. RecipeError if data of this kind has none, DataError if it is not there."""
        raise RecipeError(f"data of kind {self.kind} has no tokenizer, which generating text needs")

    def own_template(self) -> str | None:
        """The source of the chat template that it names; None if it names none."""
        return None

    def tokenises(self) -> "Iterator[Tokenised]":
        """The files for training whose texts become tokens when it is opened."""
        return iter(())

    def too_narrow(self, vocab: int) -> Iterator[tuple[str, str]]:
        """Keys of this section whose format cannot hold the tokens of such a vocabulary, and why."""
        return iter(())

    @property
    def reads_inputs(self) -> bool:
        """Whether `predict` can read examples of this form from files that a user names."""
        return self.tokenized

    @property
    def user_code(self) -> str:
        """What the recipe names as code that runs when it is opened; empty for dtrain's own data."""
        return ""

    @property
    def example_from_files(self) -> bool:
        """Whether `example` reads a file, which `check --no-data` does not."""
        return False

    def problems(self, recipe: Any, example: Example) -> Iterator[Problem]:
        """What of a recipe does not go with it; `example` is empty if it is not known."""
        del recipe, example
        return iter(())

    @property
    def has_examples(self) -> bool:
        """Whether it names any examples; without them it may still name a tokenizer and a template."""
        return True

    def in_order(self) -> Self:
        """The same data with each example once, in order: no rows at random positions."""
        return self

    def without_cache(self) -> Self:
        """The same data, opened without writing into a cache."""
        return self

    def with_fitted(self, fitted: JsonObject) -> Self:
        """See `Data.with_fitted`."""
        del fitted
        return self

    def file_groups(self, split: Split) -> "list[FileGroup]":
        """What `data prepare` can tokenise ahead."""
        del split
        return []

    def inspect(self, check: "DataCheck") -> None:
        """See `Data.inspect`."""
        check.open(self, "data")  # pyright: ignore[reportArgumentType]


class Unaugmented(DataDefaults):
    """What data has in common whose batches are used as they are read."""

    @property
    def needs_row_numbers(self) -> bool:
        return False

    @property
    def needs_pairs(self) -> bool:
        return False

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        return batch


UNKNOWN = "not known before the first run"
"""Fingerprint of data that has not been read yet: the first run accepts the data and records their fingerprint."""
