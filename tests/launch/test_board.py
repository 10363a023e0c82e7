"""What was launched from here, noted before anything is made."""

from pathlib import Path

import pytest

from dtrain.errors import EnvironmentFault, LeftBehind
from dtrain.launch import board
from dtrain.launch.job import Job


def entry(launch: str) -> board.Entry:
    return board.entry_of(Job("far", "steps: 1", {"launch": launch}, {"kind": "queued"}))


def test_a_launch_that_fails_is_struck_off_and_the_one_before_stands_again(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault), board.noted(tmp_path, entry("1"), None):
        assert board.entry(tmp_path, "far").handle == {"launch": "1"}
        raise EnvironmentFault("no capacity")
    assert not (tmp_path / "far").exists()
    first = entry("1")
    with board.noted(tmp_path, first, None):
        pass
    with pytest.raises(EnvironmentFault), board.noted(tmp_path, entry("2"), first):
        raise EnvironmentFault("no capacity")
    assert board.entry(tmp_path, "far").handle == {"launch": "1"}


@pytest.mark.parametrize("error", [LeftBehind("still there"), KeyboardInterrupt()])
def test_what_may_still_be_there_stays_noted(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), board.noted(tmp_path, entry("1"), None):
        raise error
    assert board.entry(tmp_path, "far").handle == {"launch": "1"}
