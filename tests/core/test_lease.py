"""Only one run at a time writes to a folder; the lease of a dead owner is taken over."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtrain.core import lease
from dtrain.core.errors import EnvironmentFault, Locked
from dtrain.core.lease import hold_lease


def owner(path: Path, **changes: object) -> None:
    """Write a lease as its owner writes it, with some fields changed."""
    path.write_text(json.dumps({"token": "other", "since": time.time(), **lease._self(), **changes}))


def test_a_lease_is_acquired_and_released(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    with hold_lease(path, pytest.fail) as held:
        held.check()
        with pytest.raises(Locked, match=f"in use by process {os.getpid()} on"), hold_lease(path, pytest.fail):
            pass
        held.check()
    assert not path.exists()


@pytest.mark.parametrize("dead", [
    {"pid": 2**22 + 1}, {"born": "12"}, {"boot": "another", "stale": True}, {"space": "pid:[1]", "stale": True},
])  # fmt: skip
def test_the_lease_of_a_dead_owner_is_taken_over(tmp_path: Path, dead: dict[str, object]) -> None:
    path, output = tmp_path / "lease.json", []
    owner(path, **dead)
    if "stale" in dead:
        os.utime(path, (time.time() - 61, time.time() - 61))
    with hold_lease(path, output.append):
        assert "took over the stale lease of process" in output[0]


def test_the_lease_of_another_host_is_valid_while_it_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    for elsewhere in ({"host": "another"}, {"boot": "another"}, {"space": "pid:[1]"}):
        owner(path, pid=2**22 + 1, **elsewhere)
        with pytest.raises(Locked, match="in use by process"), hold_lease(path, pytest.fail):
            pass


def test_a_run_whose_lease_was_taken_over_does_not_change_it(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    with hold_lease(path, pytest.fail) as held:
        owner(path, token="newer")
        with pytest.raises(Locked, match="taken over"):
            held.check()
    assert json.loads(path.read_text())["token"] == "newer"


def test_a_stale_damaged_lease_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    path.write_text("{")
    os.utime(path, (time.time() - 61, time.time() - 61))
    with hold_lease(path, [].append) as held:
        held.check()


@pytest.mark.parametrize("since", [1e300, None, "x", float("nan"), -1e20])
def test_an_invalid_start_time_is_left_out(tmp_path: Path, since: object) -> None:
    path = tmp_path / "lease.json"
    owner(path, since=since)
    with pytest.raises(Locked) as caught, hold_lease(path, pytest.fail):
        pass
    assert re.search(r"in use by process \d+ on \S+$", caught.value.message)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000])
def test_a_lease_without_an_owner_locks_the_folder_for_a_minute(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lease.json"
    path.write_text(text)
    with (
        pytest.raises(Locked, match="names no owner and was written less than 60 s ago"),
        hold_lease(path, pytest.fail),
    ):
        pass


def test_a_folder_that_was_moved_away_is_reported_as_such(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    with hold_lease(place / "lease.json", pytest.fail) as held:
        place.rename(tmp_path / "moved")
        with pytest.raises(EnvironmentFault, match="moved or deleted while the run wrote to it"):
            held.check()


def test_a_launched_run_waits_for_the_lease_of_another_host_to_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine restarts it within seconds of a hard kill, in another container or on another machine."""
    path, output = tmp_path / "lease.json", []
    monkeypatch.setattr(lease, "EXPIRY", 0.5)
    owner(path, boot="another")
    with pytest.raises(Locked), hold_lease(path, output.append):
        pass  # not a launched run
    monkeypatch.setenv("DTRAIN_LAUNCH", "a1")
    with hold_lease(path, output.append) as held:
        held.check()
    assert re.search(r"waiting up to 0 s|waiting up to 1 s", output[0])
    assert "took over the stale lease of process" in output[1]


def test_a_launched_run_does_not_take_over_from_a_running_owner_on_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lease.json"
    monkeypatch.setattr(lease, "EXPIRY", 0.5)
    monkeypatch.setenv("DTRAIN_LAUNCH", "a1")
    owner(path, boot="another")
    monkeypatch.setattr(lease.time, "sleep", lambda _: os.utime(path))
    with pytest.raises(Locked, match="in use by process"), hold_lease(path, [].append):
        pass


@pytest.mark.slow
def test_only_one_of_several_processes_takes_over_from_a_dead_owner(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    owner(path, pid=2**22 + 1)
    program = (
        "import sys, time, pathlib; from dtrain.core.lease import hold_lease\n"
        "with hold_lease(pathlib.Path(sys.argv[1]), lambda line: None): time.sleep(3)"
    )
    command = [sys.executable, "-c", program, str(path)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    output = [process.communicate()[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1, 1, 1]
    assert sum("Locked" in text for text in output) == 3
