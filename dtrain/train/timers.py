"""Where the time of a run goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds spent in each named section. Sections do not nest."""

    spent: dict[str, float] = field(default_factory=dict)
    entered: Callable[[str], object] = str
    """Told of each section that begins."""
    _resting: tuple[str, float] | None = None

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
        """Count as this section what is spent inside and in no other section."""
        self._resting = section, time.perf_counter() - sum(self.spent.values())
        try:
            yield
        finally:
            self.spent, self._resting = self.now(), None

    def now(self) -> dict[str, float]:
        """What was spent so far, the rest that is under way included."""
        if self._resting is None:
            return dict(self.spent)
        section, mark = self._resting
        rest = time.perf_counter() - sum(self.spent.values()) - mark
        return self.spent | {section: self.spent.get(section, 0.0) + rest}

    def add(self, section: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self.spent[section] = self.spent.get(section, 0.0) + seconds

    def of(self, *sections: str) -> float:
        """Seconds spent in these sections together."""
        return sum(self.spent.get(section, 0.0) for section in sections)
