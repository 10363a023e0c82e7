"""Decides when a save is due by time. With several processes the clock of process 0 decides for all."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LOOKS = 20
"""Exchanges between the processes per save interval: at constant step time a save is late by 1/20 of it at most."""
KEPT = 100
"""Recent exchanges whose keys are kept; older ones have been read, as collectives keep the processes together."""
PATIENCE = 1200.0
"""Seconds that a process waits for the decision of process 0."""


@dataclass
class ClockOfRank0:
    """Broadcasts two small numbers from process 0 through JAX's coordination service, without using the devices."""

    _count: int = 0

    def __call__(self, values: tuple[int, int]) -> tuple[int, int]:
        """The values of process 0. All processes must call this equally often."""
        import jax
        from jax._src import distributed  # orbax uses it, too; JAX has no public name for it

        client, self._count = distributed.global_state.client, self._count + 1
        assert client is not None, "jax.distributed is initialised"
        key = "dtrain/save_timer/{}".format
        if jax.process_index() == 0:
            client.key_value_set(key(self._count), f"{values[0]} {values[1]}")
            if self._count > KEPT:
                client.key_value_delete(key(self._count - KEPT))
            return values
        due, steps = client.blocking_key_value_get(key(self._count), int(1000 * PATIENCE)).split()
        return int(due), int(steps)


@dataclass
class SaveTimer:
    """A save is due when `seconds` have passed since the last one; with 0, never."""

    seconds: float = 0.0
    processes: int = 1
    first: int = 0
    """The step that this start of the run begins from."""
    now: Callable[[], float] = time.monotonic
    exchange: Callable[[tuple[int, int]], tuple[int, int]] = field(default_factory=ClockOfRank0)
    _answer: tuple[int, bool] = (-1, False)
    _distance: int = 1
    """Steps from the last exchange to the next. It at most doubles: the first steps are a poor measure of speed."""
    _next: int = -1
    _began: float = field(default=-1.0)
    _saved: float = field(default=-1.0)

    def __post_init__(self) -> None:
        self._began = self._saved = self.now()
        self._next = self.first + 1

    def due(self, step: int) -> bool:
        """Whether to save after this step; repeated calls for the same step give the same answer."""
        if self.seconds and step != self._answer[0]:
            self._answer = step, self._decide(step)
        return self._answer[1] and bool(self.seconds)

    def restart(self) -> None:
        """Restart the timer: a save begins."""
        self._saved = self.now()

    def _decide(self, step: int) -> bool:
        late = self.now() - self._saved >= self.seconds
        if self.processes == 1:
            return late
        if step < self._next:
            return False
        # as many steps as fit into 1/LOOKS of the interval, at the mean step time of this start
        per_step = max(self.now() - self._began, 1e-6) / (step - self.first)
        distance = max(1, min(int(self.seconds / LOOKS / per_step), 2 * self._distance))
        due, self._distance = self.exchange((int(late), distance))
        self._next = step + self._distance
        return bool(due)
