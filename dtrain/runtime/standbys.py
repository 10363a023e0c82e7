"""Processes that have imported what a run needs and wait, so that one of them can replace a process at once."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from dtrain.core import standby
from dtrain.core.parent import PARENT


def process_environment(together: bool) -> dict[str, str]:
    """The environment of a process of a run; `together`: with other processes, to which it connects directly, where JAX
    would use a proxy."""
    environment = {k: v for k, v in os.environ.items() if not (together and k.lower().endswith("_proxy"))}
    return {"TF_CPP_MIN_LOG_LEVEL": "2"} | environment | {PARENT: str(os.getpid())}


class Standbys:
    """Processes for `dtrain run` with these arguments. Each waits with the memory of its imports, about 300 MB."""

    def __init__(self, arguments: Sequence[str], count: int, *, together: bool) -> None:
        """`count`: how many wait at a time; 0: none."""
        self._arguments, self._count, self._together = arguments, count, together
        self._waiting: list[tuple[subprocess.Popen[bytes], socket.socket]] = []

    @property
    def missing(self) -> int:
        """How many more are to wait."""
        return self._count - len(self._waiting)

    def fill(self) -> None:
        """Start those that are missing."""
        while self.missing > 0:
            try:
                self._waiting.append(self._started())
            except OSError:  # too many processes, or too little memory: the run continues without them
                self._count = 0

    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "dtrain", *self._arguments],
                env=process_environment(self._together) | {standby.STANDBY: str(theirs.fileno())},
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        return process, ours

    def take(self, environment: Mapping[str, str], out: int, err: int) -> subprocess.Popen[bytes] | None:
        """Start one that waits, with more environment variables and these files for its output; None if none does."""
        while self._waiting:
            process, link = self._waiting.pop(0)
            with link:
                if process.poll() is None:
                    try:
                        standby.begin(link, environment, out, err)
                    except OSError:
                        process.kill()
                        process.wait()
                        continue
                    return process
        return None

    def close(self) -> None:
        """End those that wait."""
        for process, link in self._waiting:
            link.close()
            process.kill()
            process.wait()
        self._waiting.clear()
