"""Rented machines from here: create them, look at them, read what they say, take them away."""

import json
import secrets
import time
from abc import ABC
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dtrain.errors import EnvironmentFault, LeftBehind, Locked, Stopped
from dtrain.launch import roll
from dtrain.launch.job import Job, Row, Say
from dtrain.launch.said import Said
from dtrain.launch.tool import run
from dtrain.launch.watched import Watched

CREATION = 1800.0
"""Seconds in which machines that are to be had are made."""
POLL = 5.0
LATE = 120.0
"""Seconds after the first end in which the other hosts have said theirs."""
STOPPED = 300.0
"""Seconds in which a run that was asked to stop has saved."""


@dataclass(frozen=True)
class Found:
    """What there is of a launch, where, and in which of the cloud's states."""

    zone: str
    state: str


@dataclass(frozen=True, kw_only=True)
class Rented(Watched, ABC):
    """What all kinds of rented machines do when asked."""

    GONE: ClassVar[frozenset[str]] = frozenset()
    """States in which the machines are lost, and are deleted and asked for again."""
    FAILED: ClassVar[frozenset[str]] = frozenset()
    """States in which they never came; this is counted."""
    UP: ClassVar[frozenset[str]] = frozenset()
    """States in which machines are paid for."""
    SETTLED: ClassVar[float] = 0.0
    """Seconds after which a loss is not mended by the cloud itself."""

    def up(self, job: Job, say: Say) -> dict[str, str]:
        if self.wheel and not Path(self.wheel).expanduser().is_file():
            raise EnvironmentFault(f"there is no {self.wheel}", "pip wheel --no-deps . makes one")
        there = self.find(job)
        if there:
            raise Locked(
                f"{job.name} is there already, {there.state} in {there.zone}", f"dtrain launch down {job.name}"
            )
        if job.handle.get("before"):  # what an earlier launch left: a template, a policy, its watcher
            self.release(job, say)
        with self.written(job) as folder:
            run(self.copying(job, self.files(job)), folder=folder)
            self.create(job, self.zones, say, folder)
            try:
                for command in self.accompanying(job):
                    run(command, wait=CREATION, folder=folder)
            except (EnvironmentFault, KeyboardInterrupt):
                self.release(job, say)
                raise
        return dict(job.handle)

    def begins(self, job: Job) -> dict[str, str]:
        """A name of its own for each launch, by which its marks are known from those of earlier ones."""
        return {"launch": secrets.token_hex(4), "before": job.handle.get("launch", "")}

    def is_of(self, job: Job) -> bool:
        """Whether the machines that there are belong to this launch."""
        told = self.place(job).read("job.json")
        return not told or json.loads(told)["launch"] == job.handle["launch"]

    def is_stopped(self, job: Job) -> bool:
        """Whether it was asked to stop."""
        return bool(self.place(job).names(f"stop-{job.handle['launch']}"))

    def want(self, job: Job, again: bool) -> None:
        """Note that the machines are about to be made again, or that they are."""
        name = f"again-{job.handle['launch']}"
        if again:
            with self.written(job) as folder:
                self.place(job).put(name, folder)
        else:
            self.place(job).drop(name)

    def wanted(self, job: Job) -> bool:
        """Whether they were about to be made again."""
        return bool(self.place(job).names(f"again-{job.handle['launch']}"))

    def create(self, job: Job, zones: Sequence[str], say: Say, folder: Path) -> str:
        """Make the machines in the first zone that has them. EnvironmentFault with each zone's reason."""
        reasons, hints = list[str](), dict[str, None]()
        for zone in zones:
            say(f"asking for {self.shape} in {zone}")
            try:
                for command in self.creating(job, zone):
                    run(command, wait=CREATION, folder=folder)
                return zone
            except (EnvironmentFault, KeyboardInterrupt) as error:
                self.remove(job, zone)
                if isinstance(error, KeyboardInterrupt):
                    raise
                reasons.append(f"{zone}: {error.message}")
                hints |= {error.hint: None}
                say(reasons[-1])
        hint = "; ".join(filter(None, (*hints, "nothing was left behind")))
        raise EnvironmentFault("\n  ".join(["no zone has them:", *reasons]), hint)

    def remove(self, job: Job, zone: str) -> None:
        """Take away what there is in one zone. EnvironmentFault with what could not be."""
        problems = []
        for command in self.deleting(job, zone):
            try:
                _without(command)
            except EnvironmentFault as error:
                problems.append(error.message)
        if problems:
            raise LeftBehind("\n  ".join(["not all is taken away:", *problems]), "look for it, it may cost money")

    def find(self, job: Job) -> Found | None:
        """What there is, in the first zone that has it."""
        with ThreadPoolExecutor(len(self.zones)) as pool:
            return next(filter(None, pool.map(lambda zone: self._look(job, zone), self.zones)), None)

    def _look(self, job: Job, zone: str) -> Found | None:
        try:
            return Found(zone, self.state(json.loads(run(self.looking(job, zone)))))
        except EnvironmentFault as error:
            if absent(error):
                return None
            raise

    def marks(self, job: Job) -> dict[int, roll.Mark]:
        """What the hosts said last, by rank."""
        return roll.marks(self.place(job).read(roll.PATTERN).splitlines(), job.handle["launch"])

    def status(self, job: Job) -> list[Row]:
        found, marks = self.find(job), self.marks(job)
        over = roll.ended(marks)
        gone = "given back" if over else "asked for again" if self.wanted(job) else "taken away"
        what = f"in {found.zone}" if found else gone
        rows = [Row(f"{self.on}", found.state.lower() if found else "absent", what)]
        return rows + [_row(mark) for mark in marks.values()]

    def logs(self, job: Job, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        """What hosts have put into the bucket; with `follow` a cloud that does not answer is asked again."""
        said = Said(self, job, "*" if host is None else f"{host:05d}")
        while not said.over:
            try:
                yield from said.new(follow)
            except EnvironmentFault as error:
                if not follow:
                    raise
                yield self.on, f"-- not heard: {error.message}"
            if not said.over:
                time.sleep(POLL)

    def is_over(self, marks: dict[int, roll.Mark]) -> bool:
        """Whether all hosts have ended, or the others are not heard since the first did."""
        first = roll.ended(marks)
        every = len(marks) == self.hosts * self.slices and all(mark.code is not None for mark in marks.values())
        return first is not None and (every or time.time() - first.at > LATE)

    def stop(self, job: Job, say: Say) -> None:
        with self.written(job) as folder:
            self.place(job).put(f"stop-{job.handle['launch']}", folder)
        end = time.monotonic() + STOPPED
        while True:
            marks = self.marks(job)
            if not any(mark.there() or mark.code is not None for mark in marks.values()):
                break
            if self.is_over(marks):
                for mark in marks.values():
                    say(f"{mark.host}: {mark.what}")
                return
            if time.monotonic() > end:
                hint = f"dtrain launch status {job.name}; `down` would end it unsaved"
                raise EnvironmentFault(f"it is still saving after {STOPPED:.0f} s", hint)
            time.sleep(POLL)
        say("no machine runs it")
        self.release(job, say)

    def down(self, job: Job, say: Say) -> None:
        self.release(job, say)
        _without(self.place(job).clearing())
        say(f"{self.place(job).url} is cleared")

    def release(self, job: Job, say: Say) -> None:
        """Take all machines away; what they said stays. The watcher goes last: it may be who does this."""
        problems = []
        for zone in self.zones:
            try:
                self.remove(job, zone)
            except EnvironmentFault as error:
                problems.append(error)
        if problems:
            raise problems[0]
        left = self.find(job)
        if left:
            raise LeftBehind(f"{job.name} is still {left.state} in {left.zone}", "delete it by hand: it costs money")
        say(f"{self.on}: nothing is left in {', '.join(self.zones)}")
        for command in self.dismissing(job):
            _without(command)

    def removes(self, job: Job) -> list[str]:
        made = [" ".join(command) for zone in self.zones for command in self.deleting(job, zone)]
        made += [" ".join(command) for command in self.dismissing(job)]
        return [*made, f"{self.place(job).url}/ with its log; the run beside it stays"]


def absent(error: EnvironmentFault) -> bool:
    """Whether the cloud says that there is no such thing."""
    return any(word in error.message for word in ("NOT_FOUND", "was not found", "matched no objects"))


def _without(command: Sequence[str]) -> None:
    """Take something away, if it is there."""
    try:
        run(command, wait=CREATION)
    except EnvironmentFault as error:
        if not absent(error):
            raise


def _row(mark: roll.Mark) -> Row:
    late = time.time() - mark.at
    silent = f", silent for {late:.0f} s" if mark.code is None and late > roll.FRESH else ""
    word = "stopped" if mark.code == Stopped.exit_code else mark.state
    return Row(mark.host, word, mark.what + silent, mark.code)
