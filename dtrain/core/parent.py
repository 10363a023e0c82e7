"""End a process when its supervisor or parent process ends."""

import multiprocessing
import os
import signal
import threading
import time

PARENT = "DTRAIN_PARENT"
"""Environment variable with the process id of the supervisor."""
LOOK = 0.2
"""Seconds between checks of the parent process."""


def is_supervised() -> bool:
    """Whether this process runs under a dtrain supervisor."""
    return PARENT in os.environ


def exit_with_parent() -> None:
    """End this process when its supervisor ends for any reason, including SIGKILL; without a supervisor, do nothing."""
    if is_supervised():
        _exit_with(int(os.environ[PARENT]))


def exit_with_caller() -> None:
    """End this process, which `multiprocessing` started, when the process that started it ends."""
    caller = multiprocessing.parent_process()
    assert caller is not None and caller.pid is not None
    _exit_with(caller.pid)


def _exit_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()
