"""Stop requests, the time limit and the number of starts, with a simulated clock."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.core import run_control
from dtrain.core.errors import DtrainError, EnvironmentFault, Exhausted, HostLost, StopRequested
from dtrain.core.lease import hold_lease
from dtrain.core.run_control import (
    Limits,
    Request,
    RunControl,
    Usage,
    clear_stale_request,
    note_end,
    read_usage,
    write_usage,
)
from dtrain.core.run_dir import Folder

HOUR = 3600.0


class Clock:
    """A clock in seconds that the test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr(run_control, "LOOK", 0.01)
    return Folder(tmp_path / "run")


def begun(place: Folder, limits: Limits, *, lead: bool = True, clock: Clock | None = None) -> RunControl:
    control = RunControl(place, limits, lead=lead, now=clock or Clock())
    control.begin()
    return control


def commits(place: Folder, step: int) -> None:
    (place.checkpoints / str(step)).mkdir(parents=True)


def finished(place: Folder, state: str) -> None:
    place.path.mkdir(parents=True, exist_ok=True)
    place.write_record({"state": state, "step": 3, "reason": "", "exit_code": None})


def outcome(control: RunControl) -> tuple[type[DtrainError] | None, str]:
    control.close()
    refused = control.refusal()
    return (type(refused), refused.message) if refused else (None, "")


def test_a_launched_run_that_saves_nothing_new_is_refused_after_its_restarts(place: Folder) -> None:
    limits = Limits("a1", restarts=2)
    assert [outcome(begun(place, limits))[0] for _ in range(4)] == [None, None, None, Exhausted]
    assert outcome(begun(place, limits))[1] == "4 starts in a row saved no new checkpoint (--restarts 2)"
    commits(place, 5)
    assert [outcome(begun(place, limits))[0] for _ in range(4)] == [None, None, None, Exhausted]
    assert outcome(begun(place, Limits("b2", restarts=2)))[0] is None


def test_without_restarts_a_start_after_a_new_checkpoint_is_allowed(place: Folder) -> None:
    limits = Limits("a1", restarts=0)
    assert outcome(begun(place, limits))[0] is None
    commits(place, 5)
    assert [outcome(begun(place, limits))[0] for _ in range(2)] == [None, Exhausted]


def test_a_person_is_never_refused_for_earlier_starts_and_one_that_does_not_train_leaves_no_trace(
    place: Folder,
) -> None:
    assert {outcome(begun(place, Limits("", restarts=0)))[0] for _ in range(5)} == {None}
    assert not place.path.exists()


def test_the_other_processes_read_what_the_first_has_counted(place: Folder) -> None:
    limits = Limits("a1", restarts=0)
    other = lambda: outcome(begun(place, limits, lead=False))[0]  # noqa: E731
    assert other() is None
    outcome(begun(place, limits))
    assert other() is None
    outcome(begun(place, limits))
    assert other() is Exhausted
    assert read_usage(place, "a1").starts == 2


def test_a_finished_run_is_not_refused(place: Folder) -> None:
    limits = Limits("a1", restarts=0, hours=1.0)
    finished(place, "finished")
    place.stop_request.touch()
    assert [outcome(begun(place, limits)) for _ in range(2)] == [(None, "")] * 2


def test_beside_a_stop_request_a_launched_run_does_not_start_and_is_not_counted(place: Folder) -> None:
    outcome(begun(place, Limits("a1")))
    place.stop_request.touch()
    for lead in (True, False):
        kind, message = outcome(begun(place, Limits("a1"), lead=lead))
        assert (kind, message) == (StopRequested, "stopped on request before the first step of this start")
    assert read_usage(place, "a1").starts == 1
    assert place.stop_request.exists()


def answered(control: RunControl, does: Callable[[], Any]) -> Request:
    """The request that arrives after calling `does`."""
    event = threading.Event()
    control.attach(event.set)
    does()
    assert event.wait(20)
    control.close()
    return control.requested


def test_a_stop_request_is_noticed_during_the_run(place: Folder) -> None:
    clock = Clock()
    control = begun(place, Limits(), clock=clock)
    place.path.mkdir()

    def stop() -> None:
        place.stop_request.touch()
        clock.seconds += 1

    assert answered(control, stop) is Request.STOP
    assert control.error(Request.STOP, 40).message == "stopped on request at step 40, saved"
    assert control.error(Request.STOP, 40).exit_code == 0


def test_a_late_listener_gets_the_request_at_once(place: Folder) -> None:
    clock = Clock()
    control = begun(place, Limits(hours=1.0), clock=clock)
    answered(control, lambda: setattr(clock, "seconds", 1000 + HOUR))
    calls: list[int] = []
    control.attach(lambda: calls.append(1))
    assert calls == [1]
    assert isinstance(control.refusal(), StopRequested)  # for a run before its rendezvous


@pytest.mark.parametrize("launch", ["a1", ""])
def test_the_hours_of_all_starts_count_and_not_the_time_between(place: Folder, launch: str) -> None:
    limits, clock = Limits(launch, hours=2.0, restarts=3), Clock()
    place.path.mkdir()
    for _ in range(2):
        control = begun(place, limits, clock=clock)
        control.attach(int)
        clock.seconds += 0.75 * HOUR
        assert outcome(control) == (None, "")
        commits(place, int(clock.seconds))
        clock.seconds += 50 * HOUR
    control = begun(place, limits, clock=clock)
    assert answered(control, lambda: setattr(clock, "seconds", clock.seconds + 0.5 * HOUR)) is Request.HOURS
    assert control.error(Request.HOURS, 7).message == "the time limit of 2 hours is reached; saved at step 7"
    kind, message = outcome(begun(place, limits, clock=clock))
    assert (kind, message) == (StopRequested, "the time limit of 2 hours is reached")
    assert outcome(begun(place, limits, lead=False))[0] is (StopRequested if launch else None)
    assert outcome(begun(place, Limits(launch, hours=2.5, restarts=3), clock=clock))[0] is None


def test_the_time_of_a_start_is_recorded_regularly_in_case_it_is_killed(place: Folder) -> None:
    clock = Clock()
    control = begun(place, Limits("a1"), clock=clock)
    noted = lambda: read_usage(place, "a1").seconds  # noqa: E731
    assert noted() == 0.0
    clock.seconds += run_control.NOTE + 1
    deadline = threading.Event()
    for _ in range(2000):
        if noted():
            break
        deadline.wait(0.01)
    assert noted() == run_control.NOTE + 1
    control.close()


def test_close_waits_for_a_write_of_the_watching_thread_and_writes_last(
    place: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, ends, notes = threading.Event(), threading.Event(), list[float]()

    def write(_folder: Folder, _launch: str, usage: Usage) -> None:
        if usage.seconds:  # not the entry of the start itself
            begins.set()
            assert ends.wait(20)
            notes.append(usage.seconds)

    monkeypatch.setattr(run_control, "write_usage", write)
    clock = Clock()
    control = begun(place, Limits("a1"), clock=clock)
    clock.seconds += run_control.NOTE + 1
    assert begins.wait(20)
    clock.seconds += 1
    closing = threading.Thread(target=control.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    assert not notes
    ends.set()
    closing.join(20)
    assert notes == [run_control.NOTE + 1, run_control.NOTE + 2]


def test_a_request_left_from_before_is_removed_where_a_person_starts(place: Folder) -> None:
    output: list[str] = []
    place.path.mkdir()
    clear_stale_request(place, output.append)
    assert not output
    place.stop_request.touch()
    with hold_lease(place.lease, output.append):  # the request is for a running process
        clear_stale_request(place, output.append)
        assert place.stop_request.exists()
    clear_stale_request(place, output.append)
    assert not place.stop_request.exists()
    assert output == [f"removed {place.stop_request}, the stop request of an earlier start"]


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [(HostLost("host 1 of 2 lost"), "stopped", 75), (Exhausted("x"), "failed", 8), (StopRequested("x"), "stopped", 0)],
)
def test_run_json_has_the_reason_of_a_start_that_ended_before_the_run_could_write_it(
    place: Folder, error: DtrainError, state: str, code: int
) -> None:
    note_end(place, error)
    assert not place.record.exists()
    finished(place, "running")
    note_end(place, error)
    record = json.loads(place.record.read_text())
    assert (record["state"], record["reason"], record["exit_code"]) == (state, error.message, code)
    finished(place, "finished")
    note_end(place, error)
    assert json.loads(place.record.read_text())["state"] == "finished"


def wasted(committed: list[int]) -> list[int]:
    """For each start, the number of consecutive earlier starts that saved nothing; from the newest step at each."""
    usage, counts = Usage(), list[int]()
    for step in committed:
        usage = usage.next_start(step)
        counts.append(usage.wasted)
    return counts


@pytest.mark.parametrize(
    ("committed", "counts"),
    [
        ([-1, -1, -1, -1], [0, 1, 2, 3]),  # nothing was ever saved
        ([40, 40, 40], [0, 1, 2]),  # saved by an earlier launch
        ([-1, -1, 10, 10, 20, 20], [0, 1, 0, 1, 0, 1]),
        ([100, 90, 95, 95], [0, 1, 0, 1]),  # 100 was damaged and renamed: 95 is new
    ],
)
def test_starts_that_save_nothing_new_are_counted_since_the_newest_checkpoint(
    committed: list[int], counts: list[int]
) -> None:
    assert wasted(committed) == counts


def test_starts_are_counted_by_launch_and_time_over_all_launches(tmp_path: Path) -> None:
    place, typed, first, second = Folder(tmp_path), Usage(2, 1, -1, 5.0), Usage(1, 0, 3, 0.5), Usage(4, 2, 8, 70.0)
    write_usage(place, "", typed)
    write_usage(place, "a1", first)
    assert (read_usage(place, ""), read_usage(place, "a1")) == (typed, first)
    write_usage(place, "b2", second)
    assert [read_usage(place, launch) for launch in ("", "b2")] == [typed, second]
    # the next launch begins with no starts, and with the time of those before it: `hours` limits all of them
    assert read_usage(place, "c3") == Usage(seconds=70.0)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": 1}', '{"a": {"starts": 1}}',
     '{"a": {"starts": "x", "wasted": 0, "newest": -1, "seconds": 0.0}}',
     '{"a": {"starts": 1, "wasted": 0.5, "newest": -1, "seconds": 0.0}}',
     '{"a": {"starts": 1, "wasted": 0, "newest": -1, "seconds": 1e999}}'],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    place = Folder(tmp_path)
    place.usage.write_text(text)
    with pytest.raises(EnvironmentFault, match=r"usage\.json") as refused:
        read_usage(place, "a")
    assert "move" in refused.value.hint
