"""Requests to stop, in every order in which they can arrive."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from dtrain.core import signals
from dtrain.core.run_control import Limits, Request, RunControl
from dtrain.core.run_dir import Folder
from dtrain.train.interrupt import Interrupt, listening

TERM, INT = signal.SIGTERM, signal.SIGINT


class Left(Exception):
    """Raised where the process would have exited."""


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    def leave(code: int, text: str) -> None:
        raise Left(code, text)

    monkeypatch.setattr(signals, "leave", leave)
    return Interrupt(say=str, phase="training")


@pytest.mark.parametrize("numbers", [[TERM, TERM], [TERM] * 5, [INT, TERM, TERM]])
def test_repeated_sigterm_is_one_request_for_a_save(interrupt: Interrupt, numbers: list[int]) -> None:
    for number in numbers:
        interrupt.react(number)
    assert interrupt.agreed()


@pytest.mark.parametrize("numbers", [[INT, INT], [TERM, INT], [TERM, TERM, INT]])
def test_ctrl_c_after_a_request_leaves_at_once(interrupt: Interrupt, numbers: list[int]) -> None:
    for number in numbers[:-1]:
        interrupt.react(number)
    interrupt.since -= 1
    with pytest.raises(Left) as left:
        interrupt.react(numbers[-1])
    assert left.value.args[0] == 130


def test_a_ctrl_c_that_arrives_twice_is_one_request(interrupt: Interrupt) -> None:
    interrupt.react(INT)
    interrupt.react(INT)
    assert interrupt.agreed()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_of_memory_that_is_lost_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(signals, "leave", lambda code, text: ended.append((code, text)))
    monkeypatch.setattr(os, "_exit", ended.append)
    hook = sys.unraisablehook

    class Finished:
        def __del__(self) -> None:
            raise MemoryError

    with listening(str) as interrupt:
        interrupt.close = lambda state, reason, code: ended.append((state, reason)) or code
        Finished()
        gc.collect()
    assert ended[0] == ("failed", "out of memory")
    code, text = ended[1]  # type: ignore
    assert (code, text.splitlines()[0]) == (3, "error: out of memory")
    assert ended[2] == 3  # the process has ended here: what may follow is of the function in place of os._exit
    assert sys.unraisablehook is hook


def requested(tmp_path: Path) -> RunControl:
    control = RunControl(Folder(tmp_path), Limits("a1", hours=2), lead=True)
    control.requested = Request.HOURS
    return control


def test_a_request_of_the_control_is_one_too(interrupt: Interrupt, tmp_path: Path) -> None:
    interrupt.attach(requested(tmp_path))
    assert interrupt.agreed()
    interrupt.react(TERM)
    by: list[str] = []
    interrupt.noted = by.append
    end = interrupt.end(7, 10, lambda values: values)
    assert by == ["stop requested"]  # also where the processes agreed by a signal: its time is no loss
    assert (end.exit_code, end.message) == (0, "the time limit of 2 hours is reached; saved at step 7")
    with pytest.raises(Left) as left:
        interrupt.react(INT)
    assert left.value.args[0] == 130


def test_before_the_first_step_a_request_of_the_control_ends_the_run_at_once(
    interrupt: Interrupt, tmp_path: Path
) -> None:
    interrupt.phase = "starting"
    with pytest.raises(Left) as left:
        interrupt.attach(requested(tmp_path))
    assert left.value.args[0] == 0
    assert "the time limit of 2 hours is reached" in left.value.args[1]


def test_without_a_request_of_the_control_a_signal_is_75(interrupt: Interrupt) -> None:
    interrupt.react(TERM)
    end = interrupt.end(7, 10, lambda values: values)
    assert (end.exit_code, end.message) == (75, "saved at step 7 of 10")
