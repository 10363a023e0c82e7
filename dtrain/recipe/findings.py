"""What an inspection of a recipe's data found."""

from dataclasses import dataclass, field, replace
from typing import Any

from dtrain.core.errors import DataError
from dtrain.data.batch import Example
from dtrain.data.digest_cache import NO_CACHE
from dtrain.data.source import Source, Split

SPLITS: tuple[Split, Split] = ("train", "test")


@dataclass
class Look:
    """Result of an inspection."""

    examples: int | None = None
    """In an epoch of training."""
    found: dict[Split, Example] = field(default_factory=dict)
    problems: list[tuple[str, DataError]] = field(default_factory=list)
    """Dotted path, and what is wrong there."""
    opened: bool = False
    """Whether any of the data was read."""
    unseen: list[str] = field(default_factory=list)
    """What was not inspected, and why."""

    def open(self, data: Any, key: str) -> None:
        """Open both splits as a run does, but without the cache that a run writes."""
        data = replace(data, cache=NO_CACHE) if hasattr(data, "cache") else data
        for split in SPLITS:
            try:
                self.take(split, data.open(split))
            except DataError as error:
                self.refuse(key, error)

    def refuse(self, key: str, error: DataError) -> None:
        """Record a problem, once if both splits have it."""
        if all(error.message != known.message for _, known in self.problems):
            self.problems.append((key, error))

    def take(self, split: Split, source: Source) -> None:
        """Record the examples of a source."""
        self.found[split], self.opened = source.example, True
        self.examples = len(source) if split == "train" else self.examples
