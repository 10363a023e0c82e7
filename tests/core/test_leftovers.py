"""Temporary files of killed processes are removed by the next; those of living ones and of other hosts stay."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtrain.core import leftovers
from dtrain.core.files import atomic_write
from dtrain.core.leftovers import part_of, temporary_folder
from tests.conftest import bare_environment

PROGRAM = """
import sys, time
from pathlib import Path
from dtrain.core.leftovers import part_of, temporary_folder
with part_of(Path(sys.argv[1])) as (part, file), temporary_folder("test") as folder:
    file.write(b"x" * 1000)
    print(part, folder, flush=True)
    time.sleep(100)
"""


def started(path: Path) -> tuple["subprocess.Popen[str]", list[Path]]:
    environment = os.environ | {"TMPDIR": str(path.parent)}
    command = [sys.executable, "-c", PROGRAM, str(path)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process.stdout:
        return process, [Path(word) for word in process.stdout.readline().split()]


def old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - 1000,) * 2)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers.tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "tokens.npy"
    killed, left = started(path)
    living, kept = started(path)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    old(*left, *kept)
    foreign = tmp_path / ".tokens.npy-another.host-0123456789abcdef"
    foreign.touch()
    old(foreign)
    with part_of(path) as (part, _), temporary_folder("test"):
        assert not [one for one in left if one.exists()]
        assert all(one.exists() for one in (*kept, foreign))
        part.unlink()
    living.kill()
    living.wait()


def test_a_new_file_without_a_lock_may_be_locked_soon(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    killed, (part, folder) = started(path)
    killed.kill()
    killed.wait()
    with atomic_write(path) as file:
        file.write(b"new")
    assert part.exists()
    old(part)
    with atomic_write(path) as file:
        file.write(b"newer")
    assert not part.exists()
    assert path.read_bytes() == b"newer"
    folder.rmdir()
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


INTERRUPTED = """
import shutil
from dtrain.core import leftovers, signals

calls, removed = [], shutil.rmtree

def interrupted(*arguments, **options):
    calls.append(arguments)
    if len(calls) == 1:
        raise KeyboardInterrupt
    removed(*arguments, **options)

shutil.rmtree = interrupted
try:
    with leftovers.temporary_folder("plan"):
        pass
except KeyboardInterrupt:
    signals.end(130)
"""


def test_a_temporary_folder_whose_removal_was_interrupted_is_removed_at_the_end(tmp_path: Path) -> None:
    environment = bare_environment() | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], env=environment, timeout=200, check=False)
    assert done.returncode == 130
    assert not list(tmp_path.iterdir())
