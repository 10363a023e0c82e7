"""End a process when its supervisor or parent process ends."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

PARENT = "DTRAIN_PARENT"
"""Environment variable with the process id of the supervisor."""
CALLER = "DTRAIN_CALLER"
"""Environment variable with the process id of the command that started this run, such as a sweep."""
LOOK = 0.2
"""Seconds between checks of the parent process."""


def is_supervised() -> bool:
    """Whether this process runs under a dtrain supervisor."""
    return PARENT in os.environ


def exit_with_parent() -> None:
    """End this process when its supervisor ends for any reason, including SIGKILL; without a supervisor, do nothing."""
    if is_supervised():
        _exit_with(int(os.environ[PARENT]))


def stop_with_sweep() -> None:
    """Ask this run to save and stop when the sweep that started it ends for any reason; else do nothing.

    Not in the processes of a supervised run: their supervisor asks them.
    """
    caller = os.environ.pop(CALLER, None)  # not for what this run starts, which has another parent
    if caller and not is_supervised():
        _after(int(caller), lambda: os.kill(os.getpid(), signal.SIGTERM))


def exit_with_caller() -> None:
    """End this process, which `multiprocessing` started, when the process that started it ends."""
    caller = multiprocessing.parent_process()
    assert caller is not None and caller.pid is not None
    _exit_with(caller.pid)


def _exit_with(parent: int) -> None:
    _after(parent, lambda: os._exit(128 + signal.SIGKILL))


def _after(parent: int, act: Callable[[], object]) -> None:
    """Call a function, in a thread, once the parent process is another one."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        act()

    threading.Thread(target=watch, name="parent", daemon=True).start()
