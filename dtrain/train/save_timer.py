"""When a save is due by time. With several processes the clock of process 0 decides for all."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LOOKS = 20
"""How often in an interval the processes exchange the time: a save is late by a twentieth of it, at a steady pace."""


KEPT = 100
"""Exchanges after which nobody waits for one any more: steps keep the processes close together."""
PATIENCE = 1200.0
"""Seconds that a process waits for what process 0 decides."""


@dataclass
class FromFirst:
    """Small numbers of process 0 for every process, through JAX's coordination service: the devices take no part."""

    _count: int = 0

    def __call__(self, values: tuple[int, int]) -> tuple[int, int]:
        """The values of process 0; all processes call it equally often."""
        import jax
        from jax._src import distributed  # orbax uses the same service; JAX has no public name for it

        client, self._count = distributed.global_state.client, self._count + 1
        assert client is not None, "several processes were joined"
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
    """Due when `seconds` have passed since the last save; never where they are 0."""

    seconds: float = 0.0
    processes: int = 1
    first: int = 0
    """The step that the run starts from."""
    now: Callable[[], float] = time.monotonic
    exchange: Callable[[tuple[int, int]], tuple[int, int]] = field(default_factory=FromFirst)
    _answer: tuple[int, bool] = (-1, False)
    _distance: int = 1
    """Steps from the last exchange to the next one. It doubles at most: the first steps say little about the pace."""
    _next: int = -1
    _began: float = field(default=-1.0)
    _saved: float = field(default=-1.0)

    def __post_init__(self) -> None:
        self._began = self._saved = self.now()
        self._next = self.first + 1

    def due(self, step: int) -> bool:
        """Whether it is time to save after this step; the same answer each time for the same step."""
        if self.seconds and step != self._answer[0]:
            self._answer = step, self._decide(step)
        return self._answer[1] and bool(self.seconds)

    def restart(self) -> None:
        """A save begins: count from here."""
        self._saved = self.now()

    def _decide(self, step: int) -> bool:
        late = self.now() - self._saved >= self.seconds
        if self.processes == 1:
            return late
        if step < self._next:
            return False
        per_step = max(self.now() - self._began, 1e-6) / (step - self.first)
        wanted = max(1, min(int(self.seconds / LOOKS / per_step), 2 * self._distance))
        due, self._distance = self.exchange((int(late), wanted))
        self._next = step + self._distance
        return bool(due)
