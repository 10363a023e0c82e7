"""Measure how much time a run spends in each section."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds spent in each named section.

    At every moment exactly one section is open, so that the seconds of all sections add up to the time since the clock
    was made: first "start", and "finish" after the steps.
    """

    spent: dict[str, float] = field(default_factory=dict)
    entered: Callable[[str], object] = lambda _section: None
    """Called with the name of each section that begins."""
    _section: str = "start"
    _since: float = field(default_factory=time.perf_counter)

    @contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        """Open a section within the context; the section that was open before is opened again at the end."""
        before = self._section
        self.entered(section)
        self.switch(section)
        try:
            yield
        finally:
            self.switch(before)
            self.entered("step")

    @contextmanager
    def training(self) -> Iterator[None]:
        """The steps: within the context, time in no other section is "host"."""
        self.switch("host")
        try:
            yield
        finally:
            self.switch("finish")

    @property
    def section(self) -> str:
        """The open section."""
        return self._section

    def switch(self, section: str) -> None:
        """Close the open section and open this one."""
        now = time.perf_counter()
        self.spent[self._section] = self.spent.get(self._section, 0.0) + now - self._since
        self._section, self._since = section, now

    def now(self) -> dict[str, float]:
        """Seconds by section so far, including those of the open one."""
        return self.spent | {self._section: self.of(self._section) + time.perf_counter() - self._since}

    def add(self, section: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self.spent[section] = self.of(section) + seconds

    def of(self, *sections: str) -> float:
        """Total seconds spent in these sections, without those of the open one."""
        return sum(self.spent.get(section, 0.0) for section in sections)
