"""Retry an operation after a transient error of a network file system."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

TRANSIENT = {
    errno.EAGAIN, errno.EBUSY, errno.ECONNRESET, errno.EINTR, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip
PAUSES = (0.2, 1.0, 5.0)
"""Seconds before each retry."""

Result = TypeVar("Result")


def retried(do: Callable[[], Result]) -> Result:
    """The result of `do`, retried after transient errors. Raises the OSError if it persists or is not transient."""
    for pause in PAUSES:
        try:
            return do()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            time.sleep(pause)
    return do()
