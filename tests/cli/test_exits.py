import errno
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from dtrain.checkpoint import disk
from dtrain.cli.exits import exits, interruptible
from dtrain.core.errors import CheckpointError, DataError, Hung, NotFinite, RecipeError, Stopped

CLOSED = (
    "Gloo AllReduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.12]:4711"
)
"""Error of JAX on CPUs when another process of the run has exited."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError("x"), 2),
        (DataError("x"), 4),
        (CheckpointError("x"), 5),
        (NotFinite("x"), 7),
        (Stopped("x"), 75),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), 3),
        (KeyboardInterrupt(), 130),
        (RuntimeError(CLOSED), 9),
        (ZeroDivisionError("x"), 70),
    ],
)
def test_every_error_has_its_code_and_only_bugs_a_traceback(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, exits():
        raise error
    assert caught.value.exit_code == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 70)


@pytest.mark.parametrize("part", ["written", "read"])
def test_a_save_that_another_process_broke_off_is_no_fault_of_the_disk(tmp_path: Path, part: str) -> None:
    """The supervisor restarts after a lost connection, or leaves it to the engine that replaces hosts."""
    context = disk.writing(tmp_path, 40, lambda: None) if part == "written" else disk.reading(tmp_path)
    with (
        pytest.raises(Hung, match="lost the connection to another process of the run: UNKNOWN: Gloo AllReduce"),
        context,
    ):
        raise ValueError(f"UNKNOWN: {CLOSED}")


def test_debug_shows_every_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), exits(debug=True):
        raise DataError("broken", "fix it")
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "hint: fix it" in shown


@pytest.mark.parametrize("stored", [False, True])
def test_inside_interruptible_other_errors_reach_the_hook_that_was_there(
    monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    seen: list[str] = []

    def report(error: BaseException) -> None:
        sys.unraisablehook(SimpleNamespace(exc_type=type(error), exc_value=error))  # type: ignore[arg-type]

    monkeypatch.setattr(sys, "unraisablehook", lambda failure: seen.append(str(failure.exc_value)))
    with interruptible():
        if stored:
            disk.report_once()
        report(KeyboardInterrupt("lost"))
        report(ValueError("inside"))
    report(ValueError("after"))
    report(RuntimeError("Event loop is closed"))
    assert seen == ["inside", "after"] + ["Event loop is closed"] * (not stored)


INTERRUPTED = """
import os, signal, time
from contextlib import suppress
from dtrain.cli.exits import exits, interruptible
from dtrain.core.signals import leaving_at_once
with exits(), interruptible():
    with suppress(KeyboardInterrupt):
        with leaving_at_once("over"):
            pass
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)
    print("raised")
    with leaving_at_once("nothing yet", stdout=True), leaving_at_once():
        try:
            os.kill(os.getpid(), signal.{name})
            time.sleep(9)
        finally:
            print("raised again")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_where_nothing_is_lost_an_interrupt_ends_the_process_and_raises_nothing(name: str) -> None:
    """JAX's native code calls `terminate` if a KeyboardInterrupt is raised inside it."""
    command = [sys.executable, "-c", INTERRUPTED.format(name=name)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "raised\nnothing yet", "")


def test_where_no_memory_is_left_for_the_message_the_code_stays(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(typer, "secho", full)
    with pytest.raises(typer.Exit) as ended, exits():
        raise MemoryError
    assert ended.value.exit_code == 3
    assert capfd.readouterr().err == "error: out of memory, even for this message\n"
