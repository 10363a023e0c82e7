"""Call a function on untrusted input within limits of time and memory: in a copy of this process that is watched."""

import os
import pickle
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dtrain.core.errors import DtrainError

Result = TypeVar("Result")

SECONDS, BYTES = 60.0, 2 * 2**30
"""What a check of a stranger's recipe may cost."""
BETWEEN = 0.05
"""Seconds between two looks at the memory."""


class OverLimit(Exception):
    """The function took too long, or more memory than it may."""


def limited(function: Callable[..., Result], *arguments: Any, seconds: float = SECONDS, most: int = BYTES) -> Result:
    """What the function returns, or raises. The result must be picklable.

    Raises OverLimit if it takes longer than `seconds`, its memory grows by more than `most` bytes, or its process dies.
    Where a process cannot be copied, or its memory is not known (no /proc), the limits do not hold.
    """
    if not hasattr(os, "fork"):
        return function(*arguments)
    receiving, sending = os.pipe()
    with warnings.catch_warnings():  # of threads that the copy lacks: it uses none of them
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        _answer(sending, function, arguments)
    os.close(sending)
    try:
        content = _read(receiving, child, seconds, most)
    finally:
        os.close(receiving)
        _end(child)
    if not content:
        raise OverLimit("its process died")
    good, value = pickle.loads(content)  # written by this very process's copy
    if not good:
        raise value
    return value


def _answer(sending: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """In the copy: send the result, and end without the clean-up of the process that was copied."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            content = pickle.dumps((True, function(*arguments)))
        except DtrainError as error:
            content = pickle.dumps((False, error))
        except Exception:  # a bug, or a result that cannot be sent: the caller shows where
            content = pickle.dumps((False, RuntimeError(traceback.format_exc())))
        with os.fdopen(sending, "wb") as pipe:
            pipe.write(content)
        code = 0
    finally:
        os._exit(code)


def _read(receiving: int, child: int, seconds: float, most: int) -> bytes:
    """All that the copy sends. Raises OverLimit if it takes too long or too much."""
    content, end, before = b"", time.monotonic() + seconds, _memory(child)
    while True:
        ready, _, _ = select.select([receiving], [], [], BETWEEN)
        if ready:
            part = os.read(receiving, 1 << 20)
            if not part:
                return content
            content += part
        elif time.monotonic() > end:
            raise OverLimit(f"it takes longer than {seconds:.0f} s")
        if _memory(child) - before > most:
            raise OverLimit(f"it needs more than {most / 2**30:.0f} GiB of memory")


def _memory(process: int) -> int:
    """The bytes of a process in memory; 0 where that is not known."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _end(child: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
