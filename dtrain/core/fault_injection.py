"""Faults on purpose, for tests: live only where DTRAIN_FAULT is set.

    DTRAIN_FAULT=kill@save:commit        kill -9 just before a save is committed
    DTRAIN_FAULT=freeze@step:8/1         process 1 stands still after step 8
    DTRAIN_FAULT=raise@step:3            once in each start; with DTRAIN_FAULT_NOTES, a folder, once in all

What: kill, term, freeze, raise, full (no space left), stale (a file handle), sleep (five seconds). Several are parted
by commas.
"""

import errno
import os
import signal
import time
from dataclasses import dataclass

VARIABLE = "DTRAIN_FAULT"
NOTES = "DTRAIN_FAULT_NOTES"


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, at which point, in which process."""

    what: str
    point: str
    rank: int | None
    text: str


def strike(point: str, rank: int = 0) -> None:
    """Do what was asked for at this point."""
    for fault in _asked():
        if fault.point == point and fault.rank in (None, rank) and not _noted(fault):
            _do(fault)


def _asked() -> list[Fault]:
    found = []
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        what, _, place = text.partition("@")
        point, _, rank = place.partition("/")
        found.append(Fault(what, point, int(rank) if rank else None, text))
    return found


def _noted(fault: Fault) -> bool:
    """Whether it struck before; noted for the next time."""
    folder = os.environ.get(NOTES)
    if not folder:
        return False
    note = os.path.join(folder, fault.text.replace("/", "-"))  # noqa: PTH118
    try:
        os.close(os.open(note, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    return False


def _do(fault: Fault) -> None:
    if fault.what in ("kill", "term", "freeze"):
        numbers = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "freeze": signal.SIGSTOP}
        os.kill(os.getpid(), numbers[fault.what])
    elif fault.what == "raise":
        raise RuntimeError(f"a fault on purpose: {fault.text}")
    elif fault.what == "full":
        raise OSError(errno.ENOSPC, "No space left on device", "a fault on purpose")
    elif fault.what == "stale":
        raise OSError(errno.ESTALE, "Stale file handle", "a fault on purpose")
    elif fault.what == "sleep":
        time.sleep(5)
