"""Which process of a group is named as the cause when several end."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.core.process_info import ProcessInfo
from dtrain.core.run_dir import Folder
from dtrain.runtime.process_group import ProcessGroup


def group(folder: Path, *ends: str) -> ProcessGroup:
    """Processes that end by these statements."""
    (folder / "logs").mkdir()
    for rank in range(len(ends)):
        (folder / "logs" / str(rank)).touch()
    members = [subprocess.Popen([sys.executable, "-c", f"import os, sys, time; {end}"]) for end in ends]
    infos = [ProcessInfo(rank, len(ends), "localhost:1") for rank in range(len(ends))]
    return ProcessGroup(folder / "logs", Folder(folder), infos, members)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "code", "rank"),
    [
        (("sys.exit(9)", "time.sleep(1); sys.exit(70)"), 70, 1),
        (("os.abort()", "time.sleep(1); os.kill(os.getpid(), 9)"), 128 + signal.SIGKILL, 1),
        (("time.sleep(2); sys.exit(70)", "sys.exit(3)"), 3, 1),
        (("sys.exit(9)", "time.sleep(1); sys.exit(9)"), 9, 0),
    ],
)
def test_the_cause_is_named_and_not_who_lost_the_connection(
    tmp_path: Path, ends: tuple[str, ...], code: int, rank: int
) -> None:
    with group(tmp_path, *ends) as running:
        end = running.watch(lambda: None)
    assert (end.code, end.rank) == (code, rank)


def test_another_process_is_waited_for_but_not_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.runtime.process_group.AFTER_LOSS", 0.5)
    with group(tmp_path, "sys.exit(9)", "time.sleep(100)") as running:
        assert running.watch(lambda: None).code == 9
