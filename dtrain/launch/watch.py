"""Care for rented machines that nobody else makes again, after a preemption or a start that fails."""

import time
from dataclasses import dataclass

from dtrain.errors import EnvironmentFault, Exhausted, Stopped
from dtrain.launch import roll
from dtrain.launch.job import Job, Say
from dtrain.launch.rented import LATE, Found, Rented

PAUSE = 30.0
BEGIN = 2700.0
"""Seconds in which machines that are there have all begun; one that has not is lost, and with it the others wait."""


@dataclass
class Watch:
    """One launch. Preemptions are free; what fails and saves nothing new is counted."""

    target: Rented
    job: Job
    say: Say
    begin: float = BEGIN
    failures: int = 0
    reached: int = -1
    told: str = ""
    state: str = ""
    since: float = 0.0
    """When it was first seen in that state, by the monotonic clock."""
    whole: float = 0.0
    """When all hosts were last heard."""

    def run(self, pause: float = PAUSE) -> int:
        """Until it is over; how it ended. Exhausted where machines fail again and again."""
        code: int | None = None
        while True:
            try:
                code = self.round() if code is None else code
                if code is not None:
                    if self.target.is_of(self.job):  # and not already of a later launch
                        self.target.release(self.job, self.say)
                    return code
            except EnvironmentFault as error:  # the cloud will answer again
                self._once(error.message)
            time.sleep(pause)

    def round(self) -> int | None:
        """Look once, and do what is to be done; an exit code where the run is over."""
        marks, found = self.target.marks(self.job), self.target.find(self.job)
        if found is None:  # a host gives the machines back after it has said how it ended
            marks = self.target.marks(self.job)
        over, alive = roll.ended(marks), any(mark.there() for mark in marks.values())
        if over:  # hosts give themselves back; those that cannot are taken
            return over.code if found is None or time.time() - over.at > 2 * LATE else None
        if not alive and self.target.is_stopped(self.job):
            return Stopped.exit_code
        if found is None:
            if not self.target.wanted(self.job):
                self.say("somebody took the machines away: they are not asked for again")
                return EnvironmentFault.exit_code
            self._create(self.target.zones)
        else:
            self._look(found, marks)
        return None

    def _look(self, found: Found, marks: dict[int, roll.Mark]) -> None:
        """Ask for machines again that are lost, never came, or never began."""
        now, saved = time.monotonic(), max((mark.saved for mark in marks.values()), default=-1)
        if found.state != self.state:
            self.state, self.since, self.whole = found.state, now, now
        if sum(mark.there() for mark in marks.values()) >= self.target.hosts * self.target.slices:
            self.whole = now
        if found.state in self.target.GONE and now - self.since >= self.target.SETTLED:
            self.say(f"{found.state} in {found.zone}")
            self._again(found.zone, self.target.zones)
        elif found.state in self.target.FAILED:
            self.say(f"{found.state} in {found.zone}")
            self._failed(found.zone, saved)
        elif found.state in self.target.UP and now - self.whole > self.begin:
            heard = sum(mark.there() for mark in marks.values())
            hosts = self.target.hosts * self.target.slices
            self.say(f"{heard} of {hosts} hosts are heard in {found.zone}, after {self.begin / 60:.0f} minutes")
            self._failed(found.zone, saved)

    def _failed(self, zone: str, saved: int) -> None:
        self.failures, self.reached = (1 if saved > self.reached else self.failures + 1), max(saved, self.reached)
        if self.failures > self.target.restarts:
            self.target.release(self.job, self.say)
            raise Exhausted(f"the machines failed {self.failures} times, and nothing new was saved")
        after = self.target.zones.index(zone) + 1
        self._again(zone, (*self.target.zones[after:], *self.target.zones[:after]))

    def _again(self, zone: str, zones: tuple[str, ...]) -> None:
        self.target.want(self.job, True)
        self.target.remove(self.job, zone)
        self._create(zones)

    def _create(self, zones: tuple[str, ...]) -> None:
        self.state = ""
        try:
            with self.target.written(self.job) as folder:
                self.target.create(self.job, zones, self.say, folder)
            self.target.want(self.job, False)
        except EnvironmentFault as error:
            self._once(error.message)

    def _once(self, message: str) -> None:
        if message != self.told:
            self.say(message)
        self.told = message
