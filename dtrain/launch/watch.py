"""Care for rented machines that nobody else makes again: TPU VMs and queued resources after a preemption."""

import time
from dataclasses import dataclass

from dtrain.errors import EnvironmentFault, Exhausted
from dtrain.launch import roll
from dtrain.launch.job import Job, Say
from dtrain.launch.rented import LATE, Found, Rented

PAUSE = 30.0


@dataclass
class Watch:
    """One launch. Preemptions are free; what fails and saves nothing new is counted."""

    target: Rented
    job: Job
    say: Say
    failures: int = 0
    reached: int = -1

    def run(self, pause: float = PAUSE) -> int:
        """Until it is over; how it ended. Exhausted where machines fail again and again."""
        told = ""
        while True:
            try:
                code = self.round()
            except EnvironmentFault as error:  # the cloud will answer again
                code, told = None, self._once(error.message, told)
            if code is not None:
                self.target.release(self.job, self.say)
                return code
            time.sleep(pause)

    def round(self) -> int | None:
        """Look once, and do what is to be done; an exit code where the run is over."""
        marks, found = self.target.marks(self.job), self.target.find(self.job)
        if found is None:  # a host gives the machines back after it has said how it ended
            marks = self.target.marks(self.job)
        over = roll.ended(marks)
        if over:  # hosts give themselves back; those that cannot are taken
            return over.code if found is None or time.time() - over.at > 2 * LATE else None
        if found is None:
            if not self.target.wanted(self.job):
                self.say("somebody took the machines away: they are not asked for again")
                return EnvironmentFault.exit_code
            self._create(self.target.zones)
        elif found.state in self.target.GONE | self.target.FAILED:
            self.say(f"{found.state} in {found.zone}")
            self._again(found, max((mark.saved for mark in marks.values()), default=-1))
        return None

    def _once(self, message: str, told: str) -> str:
        if message != told:
            self.say(message)
        return message

    def _again(self, found: Found, saved: int) -> None:
        zones = self.target.zones
        if found.state in self.target.FAILED:
            self.failures, self.reached = (1 if saved > self.reached else self.failures + 1), max(saved, self.reached)
            if self.failures > self.target.restarts:
                self.target.release(self.job, self.say)
                raise Exhausted(f"the machines failed {self.failures} times, and nothing new was saved")
            after = zones.index(found.zone) + 1
            zones = (*zones[after:], *zones[:after])
        self.target.want(self.job, True)
        self.target.remove(self.job, found.zone)
        self._create(zones)

    def _create(self, zones: tuple[str, ...]) -> None:
        try:
            with self.target.written(self.job) as folder:
                self.target.create(self.job, zones, self.say, folder)
            self.target.want(self.job, False)
        except EnvironmentFault as error:
            self.say(error.message)
