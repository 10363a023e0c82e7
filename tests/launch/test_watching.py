"""Care for rented machines, told by a target that only notes what was asked of it."""

import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from dtrain.errors import EnvironmentFault, Exhausted
from dtrain.launch import roll
from dtrain.launch.job import Job
from dtrain.launch.rented import LATE, Found, Rented
from dtrain.launch.watch import Watch


@dataclass
class Machines:
    """What there is, and what was done."""

    found: Found | None = field(default_factory=lambda: Found("a", "ACTIVE"))
    marked: dict[int, roll.Mark] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    stopped: bool = False
    again: bool = False
    latest: bool = True
    refuses: int = 0
    zones: tuple[str, ...] = ("a", "b", "c")
    hosts: int = 2
    slices: int = 1
    restarts: int = 1
    GONE: frozenset[str] = frozenset({"SUSPENDED"})
    FAILED: frozenset[str] = frozenset({"FAILED"})
    UP: frozenset[str] = frozenset({"ACTIVE"})
    SETTLED: float = 0.0

    def mark(self, rank: int, **more: Any) -> None:
        given = {"launch": "now", "host": f"w-{rank}", "at": time.time(), "state": "running"} | more
        self.marked[rank] = roll.Mark(rank=rank, **given)

    def marks(self, _job: Job) -> dict[int, roll.Mark]:
        return self.marked

    def find(self, _job: Job) -> Found | None:
        return self.found

    def is_stopped(self, _job: Job) -> bool:
        return self.stopped

    def is_of(self, _job: Job) -> bool:
        return self.latest

    def wanted(self, _job: Job) -> bool:
        return self.again

    def want(self, _job: Job, again: bool) -> None:
        self.again = again

    def remove(self, _job: Job, zone: str) -> None:
        self.done.append(f"remove {zone}")

    def release(self, _job: Job, _say: Any) -> None:
        if self.refuses:
            self.refuses -= 1
            raise EnvironmentFault("not now")
        self.done.append("release")

    def written(self, _job: Job) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def create(self, _job: Job, zones: tuple[str, ...], _say: Any, _folder: Any) -> None:
        if self.refuses:
            self.refuses -= 1
            raise EnvironmentFault("no capacity")
        self.done.append(f"create {'/'.join(zones)}")
        self.found = Found(zones[0], "ACTIVE")


def watch(machines: Machines, **more: Any) -> Watch:
    return Watch(cast("Rented", machines), Job("far", ""), lambda _: None, **more)


def test_what_runs_is_left_alone() -> None:
    machines = Machines()
    machines.mark(0)
    machines.mark(1)
    assert watch(machines).round() is None
    assert machines.done == []


def test_a_loss_is_made_again_from_the_first_zone_and_until_it_succeeds() -> None:
    machines = Machines(found=Found("b", "SUSPENDED"), refuses=1)
    watched = watch(machines)
    assert watched.round() is None
    assert (machines.done, machines.again) == (["remove b"], True)
    machines.found = None
    assert watched.round() is None
    assert machines.done == ["remove b", "create a/b/c"]
    assert not machines.again


def test_a_loss_that_the_cloud_may_mend_is_given_time() -> None:
    machines = Machines(found=Found("a", "SUSPENDED"), SETTLED=0.2)
    watched = watch(machines)
    watched.round()
    assert machines.done == []
    time.sleep(0.25)
    watched.round()
    assert machines.done == ["remove a", "create a/b/c"]


def test_failures_go_to_the_next_zone_and_are_counted_until_something_is_saved() -> None:
    machines = Machines(found=Found("a", "FAILED"))
    watched = watch(machines)
    watched.round()
    assert machines.done == ["remove a", "create b/c/a"]
    machines.found = Found("b", "FAILED")
    machines.mark(0, saved=10, at=0.0)
    watched.round()
    machines.found = Found("c", "FAILED")
    with pytest.raises(Exhausted, match="failed 2 times"):
        for _ in range(2):
            watched.round()
            machines.found = Found("c", "FAILED")
    assert machines.done[-1] == "release"


def test_machines_that_never_begin_or_fall_silent_are_not_paid_for_for_ever() -> None:
    machines = Machines()
    machines.mark(0)
    watched = watch(machines, begin=0.2)
    watched.round()
    assert machines.done == []
    time.sleep(0.25)
    watched.round()
    assert machines.done == ["remove a", "create b/c/a"]
    machines.found = Found("b", "WAITING_FOR_RESOURCES")  # in a queue they may be for days
    watched.round()
    time.sleep(0.25)
    watched.round()
    assert len(machines.done) == 2


def test_the_end_is_believed_and_what_is_left_is_taken_with_insistence() -> None:
    machines = Machines(found=None, refuses=2)
    machines.mark(0, state="ended", code=7)
    assert watch(machines).run(0.01) == 7
    assert machines.done == ["release"]


def test_hosts_have_time_to_give_themselves_back() -> None:
    machines = Machines()
    machines.mark(0, state="ended", code=0)
    assert watch(machines).round() is None
    machines.mark(0, state="ended", code=0, at=time.time() - 3 * LATE)
    assert watch(machines).round() == 0


def test_a_stop_while_nothing_runs_is_the_end() -> None:
    machines = Machines(found=Found("a", "WAITING_FOR_RESOURCES"), stopped=True)
    machines.mark(0, at=0.0)
    assert watch(machines).run(0.01) == 75
    assert machines.done == ["release"]
    machines = Machines(stopped=True)
    machines.mark(0)
    assert watch(machines).round() is None  # it is saving


def test_machines_of_a_later_launch_are_not_taken() -> None:
    machines = Machines(found=None, latest=False)
    assert watch(machines).run(0.01) == 3
    assert machines.done == []
