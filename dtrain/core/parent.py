"""The process that watches over this one: it is not outlived."""

import multiprocessing
import os
import signal
import threading
import time

PARENT = "DTRAIN_PARENT"
"""The number of the process that watches over this one."""
LOOK = 0.2


def watched() -> bool:
    """Whether another process of dtrain watches over this one."""
    return PARENT in os.environ


def exit_with_parent() -> None:
    """End this process when the one that watches over it ends, however that comes about."""
    if watched():
        _exit_with(int(os.environ[PARENT]))


def exit_with_caller() -> None:
    """End this process, one of multiprocessing's, when the one that started it ends."""
    caller = multiprocessing.parent_process()
    assert caller is not None and caller.pid is not None
    _exit_with(caller.pid)


def _exit_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()
