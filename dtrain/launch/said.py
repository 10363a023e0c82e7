"""What the hosts of rented machines printed, as they put it into the bucket."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtrain.launch import roll
from dtrain.launch.job import Job

if TYPE_CHECKING:
    from dtrain.launch.rented import Rented


@dataclass
class Said:
    """What was heard of a launch so far."""

    target: "Rented"
    job: Job
    ranks: str
    heard: set[str] = field(default_factory=set)
    state: str = ""
    over: bool = False

    def new(self, follow: bool) -> Iterator[tuple[str, str]]:
        """What there is beyond that; how it ended, at the end."""
        place, marks = self.target.place(self.job), self.target.marks(self.job)
        names = place.names(f"log/{self.job.handle['launch']}-{self.ranks}-*")
        fresh = [name for name in names if name not in self.heard]
        for rank in sorted({_rank(name) for name in fresh}):
            host = marks[rank].host if rank in marks else str(rank)
            lines = place.read(*(name for name in fresh if _rank(name) == rank)).splitlines()
            self.heard |= {name for name in fresh if _rank(name) == rank}
            yield from ((host, line) for line in lines)
        self.over = not follow or self.target.is_over(marks)
        if self.over:
            ended = sorted((mark for mark in marks.values() if mark.code is not None), key=lambda mark: mark.at)
            yield from ((mark.host, f"-- ended: {mark.what}") for mark in ended)
        elif all(mark.state == "waiting" for mark in marks.values()):
            yield from self._waiting(marks)

    def _waiting(self, marks: dict[int, roll.Mark]) -> Iterator[tuple[str, str]]:
        """What it waits for, where that is news."""
        found = self.target.find(self.job)
        now = f"{found.state} in {found.zone}" if found else "absent"
        now += "".join(f"; {mark.host} {mark.what}" for mark in marks.values())
        if now != self.state:
            yield self.target.on, f"-- {now}"
        self.state = now


def _rank(name: str) -> int:
    return int(name.split("-")[1])
