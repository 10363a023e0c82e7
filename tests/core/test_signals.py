"""No signal is lost, whatever the main thread is doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtrain.core import signals
from tests.conftest import bare_environment
from tests.waiting import until

IN_C = """
import hashlib
from dtrain.core import signals
signals.listen(run=True)
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # takes minutes in C; Python calls no handler, as during XLA code
"""

IN_IMPORT = """
import os, signal, sys, threading, time
from dtrain.core import signals

class Finder:
    def find_spec(name, path, target=None):
        if name == "absent":
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(100):
                time.sleep(0.01)

def react(number):
    importing = threading.Thread(target=__import__, args=("stringprep",))
    importing.start()
    importing.join(5)
    signals.leave(1 if importing.is_alive() else 75, "")

sys.meta_path.insert(0, Finder)
with signals.reacting(react):
    try:
        import absent
    except ImportError:
        time.sleep(20)
"""

BEFORE_RELEASE = """
import os, signal, sys, time
from dtrain.core import signals
signals.listen(run=False)
sys.setswitchinterval(100)  # the thread that reacts does not run before the main thread sleeps
os.kill(os.getpid(), signal.SIGINT)
signals.current().release()
time.sleep(20)
"""


def settled(seen: list[int], count: int) -> list[int]:
    until(lambda: len(seen) >= count)
    return seen


def test_each_signal_is_reacted_to_once_and_the_handlers_are_put_back() -> None:
    seen: list[int] = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with signals.reacting(seen.append):
        for count, number in enumerate((signal.SIGTERM, signal.SIGINT, signal.SIGTERM), 1):
            os.kill(os.getpid(), number)
            settled(seen, count)
    assert seen == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signals.current() is None


def test_a_signal_in_a_part_that_must_not_be_cut_is_reacted_to_after_it() -> None:
    seen: list[int] = []
    with signals.reacting(seen.append):
        with signals.held():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            assert seen == []
        assert settled(seen, 1) == [signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_inside_a_compiler_leaves_at_once(number: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", IN_C], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, shown = process.communicate(timeout=200)
    assert process.returncode == 75
    assert f"stopped: {signal.Signals(number).name}: stopped before the first step" in shown


@pytest.mark.slow
def test_a_reaction_may_import_although_the_main_thread_is_importing() -> None:
    done = subprocess.run([sys.executable, "-c", IN_IMPORT], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 75, done.stderr


def test_a_signal_just_before_the_handlers_are_released_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", BEFORE_RELEASE], capture_output=True, timeout=200, check=False)
    assert done.returncode == 130, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 2.5])
def test_ctrl_c_ends_a_long_verb_with_130_and_leaves_no_process(tmp_path: Path, seconds: float) -> None:
    command = [sys.executable, "-m", "dtrain", "verify", "mlp-digits"]
    environment = bare_environment() | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    while len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1:  # until the thread that reacts to signals runs
        assert process.poll() is None
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=200)
    assert process.returncode == 130, shown
    assert "Traceback" not in shown
    assert not list(tmp_path.iterdir())
