"""A file that grows line by line while others read it, brought to the disk, or to a mounted bucket, on a schedule.

A bucket's file system uploads a file when it is closed or synced, and then all of it. So a thread syncs: the run
never waits for an upload, and a machine that is lost takes with it what was written since the last one.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dtrain.core.errors import EnvironmentFault, cause, way_out

EVERY = 30.0
"""Seconds from one sync to the next."""
RATE = 1e6
"""Bytes a second: the most that syncs of a whole file may come to; the larger the file, the rarer they are."""


class Appender:
    """Appends text; each write is seen by readers at once, and is on the disk after the next sync."""

    def __init__(self, path: Path, warn: Callable[[str], None], every: float = EVERY) -> None:
        """`warn` gets a line where a sync fails; the next one tries again. EnvironmentFault where the file cannot be
        opened."""
        self.path, self._warn, self._every = path, warn, every
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._fault(error) from error
        self._waiting: deque[bytes] = deque()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._unsynced = False
        self._failed: OSError | None = None
        self._thread = threading.Thread(target=self._sync_regularly, name=f"sync {path.name}", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Append; while a sync is under way the text waits in memory, and not the caller.

        EnvironmentFault where this text, or one that had to wait, cannot be written.
        """
        self._waiting.append(text.encode())
        self._drain()
        if self._failed:
            raise self._fault(self._failed) from self._failed

    def sync(self) -> None:
        """All that was written is on the disk, or in the bucket, when this returns; OSError where it is not."""
        with self._lock:
            if not self._file.closed:
                self._write_waiting()
                self._unsynced = False
                try:
                    os.fsync(self._file.fileno())
                except OSError:
                    self._unsynced = True
                    raise
        self._drain()

    def close(self) -> None:
        """Sync and close; a warning where that fails."""
        self._closed.set()
        self._thread.join()
        self._sync_or_warn()
        with self._lock, suppress(OSError):  # the sync would have failed, too
            self._file.close()

    def _drain(self) -> None:
        """Write what waits, unless another thread is about to. It is looked at again after the lock was given back:
        a text that came while another thread held it does not stay behind."""
        while self._waiting and not self._failed and self._lock.acquire(blocking=False):
            try:
                self._write_waiting()
            except OSError as error:
                self._failed = error
            finally:
                self._lock.release()

    def _write_waiting(self) -> None:
        while self._waiting:
            left, self._unsynced = self._waiting.popleft(), True
            while left:
                left = left[self._file.write(left) :]

    def _sync_regularly(self) -> None:
        while not self._closed.wait(self._pause()):
            if self._unsynced:
                self._sync_or_warn()

    def _sync_or_warn(self) -> None:
        try:
            self.sync()
        except OSError as error:
            self._warn(f"{self.path} could not be brought to the disk: {cause(error)}")

    def _pause(self) -> float:
        return max(self._every, os.fstat(self._file.fileno()).st_size / RATE)

    def _fault(self, error: OSError) -> EnvironmentFault:
        return EnvironmentFault(f"cannot write to {self.path}: {cause(error)}", way_out(error))
