"""The account of a reader: what it did with each name in something that others wrote."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject

SHOWN = 12
"""Most names of one kind that a line shows."""


@dataclass(frozen=True)
class KnownNames:
    """The names that a reader knows, in one form of what it reads."""

    used: Collection[str]
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Names without an effect, each with the reason."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Names that change what is computed and are not supported, each with what to do; {name} stands for the name."""

    def sort(self, where: str, values: Mapping[str, Any], allowed: Collection[str] = ()) -> tuple[list[str], list[str]]:
        """The names that are ignored, and those that are not known; `allowed` are names that the user chose to ignore.

        Raises DataError, with `where`, for a name that is refused and has a value.
        """
        ignored, unknown = [], []
        for name, value in values.items():
            if name in self.used:
                continue
            if name in allowed or name in self.ignored:
                ignored.append(name)
            elif name not in self.refused:
                unknown.append(name)
            elif value not in (None, "", [], {}):
                raise DataError(f"{where}: {name} is not supported", self.refused[name].format(name=name))
        return ignored, unknown


@dataclass
class Account:
    """What was met while reading, as counts by kind and name; it can be stored as JSON and added up."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, kind: str, names: Iterable[str]) -> None:
        """Count each name once more."""
        self.counts.setdefault(kind, Counter()).update(names)

    def of(self, kind: str) -> Mapping[str, int]:
        """The counts of a kind by name, the most frequent first."""
        return dict(self.counts.get(kind, Counter()).most_common())

    def named(self, kind: str) -> str:
        """The names of a kind with their counts, the most frequent first: "score (120), source (7)"."""
        found = [f"{name!r} ({count:,})" for name, count in self.of(kind).items()]
        return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")

    def values(self) -> JsonObject:
        return {kind: dict(sorted(counts.items())) for kind, counts in sorted(self.counts.items())}


def account_of(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> Account:
    """The sum of stored accounts."""
    total = Account()
    for part in parts:
        for kind, counts in part.items():
            total.counts.setdefault(kind, Counter()).update(counts)
    return total
