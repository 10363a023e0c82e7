"""Where the time of a run goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds spent in each named section. Sections do not nest."""

    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(section, time.perf_counter() - start)

    @contextmanager
    def rest(self, section: str) -> Iterator[None]:
        """Count as this section what is spent inside and in no other section."""
        start, others = time.perf_counter(), sum(self.spent.values())
        try:
            yield
        finally:
            self.add(section, time.perf_counter() - start - (sum(self.spent.values()) - others))

    def add(self, section: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self.spent[section] = self.spent.get(section, 0.0) + seconds

    def of(self, *sections: str) -> float:
        """Seconds spent in these sections together."""
        return sum(self.spent.get(section, 0.0) for section in sections)
