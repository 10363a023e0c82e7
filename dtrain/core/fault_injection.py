"""Fault injection for tests; active only if DTRAIN_FAULT is set.

    DTRAIN_FAULT=kill@save:commit        SIGKILL just before a save is committed
    DTRAIN_FAULT=freeze@step:8/1         SIGSTOP to process 1 after step 8
    DTRAIN_FAULT=raise@step:3            once per start; once in total if DTRAIN_FAULT_NOTES names a folder

Actions: kill, term, freeze, raise, full (no space left), stale (stale file handle), sleep (five seconds), pace (20
milliseconds). Separate several faults with commas. The point `step` is after every step.
"""

import errno
import os
import signal
import time
from dataclasses import dataclass

from dtrain.core.signals import held

VARIABLE = "DTRAIN_FAULT"
NOTES = "DTRAIN_FAULT_NOTES"
PAUSES = {"sleep": 5.0, "pace": 0.02}
"""Seconds of the actions that wait."""


@dataclass(frozen=True)
class Fault:
    """One fault: its action, the point in the code and the process; `rank` None means every process."""

    what: str
    point: str
    rank: int | None
    text: str


def strike(point: str, rank: int = 0) -> None:
    """Trigger the faults that DTRAIN_FAULT requests at this point."""
    for fault in _requested():
        if fault.point == point and fault.rank in (None, rank) and not _triggered_before(fault):
            _trigger(fault)


def _requested() -> list[Fault]:
    faults = []
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        what, _, location = text.partition("@")
        point, _, rank = location.partition("/")
        faults.append(Fault(what, point, int(rank) if rank else None, text))
    return faults


def _triggered_before(fault: Fault) -> bool:
    """Whether the fault was triggered in an earlier call; records this call if DTRAIN_FAULT_NOTES is set."""
    folder = os.environ.get(NOTES)
    if not folder:
        return False
    note = os.path.join(folder, fault.text.replace("/", "-"))  # noqa: PTH118
    try:
        os.close(os.open(note, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    return False


def _trigger(fault: Fault) -> None:
    if fault.what in ("kill", "term", "freeze"):
        numbers = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "freeze": signal.SIGSTOP}
        os.kill(os.getpid(), numbers[fault.what])
        with held():  # at its end this thread reacts, if the one that handles signals has not done so yet
            pass
    elif fault.what == "raise":
        raise RuntimeError(f"injected fault: {fault.text}")
    elif fault.what == "full":
        raise OSError(errno.ENOSPC, "No space left on device", "injected fault")
    elif fault.what == "stale":
        raise OSError(errno.ESTALE, "Stale file handle", "injected fault")
    elif fault.what in PAUSES:
        time.sleep(PAUSES[fault.what])
