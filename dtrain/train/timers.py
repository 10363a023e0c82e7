"""Measure how much time a run spends in each section."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds spent in each named section. Sections do not nest."""

    spent: dict[str, float] = field(default_factory=dict)
    entered: Callable[[str], object] = lambda _section: None
    """Called with the name of each section that begins."""
    _resting: tuple[str, float] | None = None
    """The section of an open `rest`, and the clock at its start less all seconds counted until then."""

    @contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        start = time.perf_counter()
        self.entered(section)
        try:
            yield
        finally:
            self.add(section, time.perf_counter() - start)
            self.entered("step")

    @contextmanager
    def rest(self, section: str) -> Iterator[None]:
        """Attribute time spent inside, but in no other section, to this section."""
        self._resting = section, time.perf_counter() - sum(self.spent.values())
        try:
            yield
        finally:
            self.spent, self._resting = self.now(), None

    def now(self) -> dict[str, float]:
        """Seconds by section so far, including those of an open `rest`."""
        if self._resting is None:
            return dict(self.spent)
        section, mark = self._resting
        rest = time.perf_counter() - sum(self.spent.values()) - mark
        return self.spent | {section: self.spent.get(section, 0.0) + rest}

    def add(self, section: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self.spent[section] = self.spent.get(section, 0.0) + seconds

    def of(self, *sections: str) -> float:
        """Total seconds spent in these sections."""
        return sum(self.spent.get(section, 0.0) for section in sections)
