"""Collectives that run one after another beside the work of a loop body, as on GPUs.

All-gathers of parameters can begin with the pass, in the order in which their results are read; a step that reads one
waits for it. Reduce-scatters begin when what they sum is computed, and the end of the pass waits for them. All others
wait for what was queued before, and the work waits for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from dtrain.plan.jaxpr_flat import VIEWS, Step
from dtrain.plan.replay import CollectiveCost

Wait = tuple[float, CollectiveCost]
"""Seconds that the work waits, and for which collective."""


@dataclass
class Queue:
    """One pass through a loop body. Times are seconds since its beginning."""

    clock: float = 0.0
    """Time of the work."""
    end: float = 0.0
    """When the last of the queued collectives ends."""
    called: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)
    """Kinds and axes of the collectives so far; compilers for GPUs combine those of a pass."""
    gathers: dict[int, tuple[float, CollectiveCost]] = field(default_factory=dict)
    """Seconds of the all-gathers whose results no step has read yet, by variable."""
    views: dict[int, int] = field(default_factory=dict)
    """The variable of which each is a view or a cast."""
    made: dict[int, float] = field(default_factory=dict)
    """When each variable was computed."""
    sums: list[tuple[float, float, CollectiveCost]] = field(default_factory=list)
    """Reduce-scatters: when what they sum was computed, their seconds."""

    def reads(self, step: Step) -> Iterator[Wait]:
        """Before a step: wait for the gathered arrays that it reads, unless it is a view or a cast of them."""
        if step.name in (*VIEWS, "convert_element_type"):
            several = len(step.made) == len(step.read)
            for at, var in enumerate(step.made):
                source = step.read[at if several else 0]
                self.views[var] = self.views.get(source, source)
            return
        for var in step.read:
            if gather := self.gathers.pop(self.views.get(var, var), None):
                seconds, collective = gather
                self.end += seconds
                yield self._until(self.end), collective

    def ran(self, step: Step) -> None:
        """After a step."""
        self.made |= dict.fromkeys(step.made, self.clock)

    def add(self, step: Step, seconds: float, collective: CollectiveCost, *, gathers: bool, hidden: bool) -> float:
        """Queue a collective; `hidden`: work continues beside it. Returns the seconds that the work waits at once."""
        if hidden and gathers:
            self.gathers[step.made[0]] = seconds, collective
        elif hidden:
            made = self.made.get(self.views.get(step.read[0], step.read[0]), 0.0)
            self.sums.append((made, seconds, collective))
        else:
            self.end = max(self.end, self.clock) + seconds
            return self._until(self.end)
        return 0.0

    def last(self) -> Iterator[Wait]:
        """At the end of the pass: wait for the reduce-scatters."""
        for made, seconds, _ in sorted(self.sums, key=lambda one: one[0]):
            self.end = max(self.end, made) + seconds
        if self.sums:
            yield self._until(self.end), self.sums[-1][-1]

    def _until(self, end: float) -> float:
        waited = max(end - self.clock, 0.0)
        self.clock += waited
        return waited
