"""Once more, after a pause, where a file system that is reached over a network falters."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

TRANSIENT = {
    errno.EAGAIN, errno.EBUSY, errno.ECONNRESET, errno.EINTR, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip
PAUSES = (0.2, 1.0, 5.0)
"""Seconds before each further try."""

Found = TypeVar("Found")


def retried(do: Callable[[], Found]) -> Found:
    """What `do` gives. The last OSError where it fails for good, or for a reason that will not pass."""
    for pause in PAUSES:
        try:
            return do()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            time.sleep(pause)
    return do()
