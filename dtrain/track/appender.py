"""An append-only file that others read while it grows, synced to disk or to a mounted bucket on a schedule.

The file system of a bucket uploads the whole file when it is closed or synced. So a thread syncs: the run never waits
for an upload, and the loss of a machine loses only the text since the last sync.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dtrain.core.errors import EnvironmentFault, cause, way_out

EVERY = 30.0
"""Minimum seconds between two syncs."""
RATE = 1e6
"""Maximum average rate in bytes/s if every sync uploads the whole file: the larger the file, the rarer the syncs."""


class Appender:
    """Appends text: readers can read it at once, and it is on disk after the next sync."""

    def __init__(self, path: Path, warn: Callable[[str], None], every: float = EVERY) -> None:
        """`warn` prints a line if a sync fails; the next sync tries again. EnvironmentFault if the file cannot be
        opened."""
        self.path, self._warn, self._every = path, warn, every
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._fault(error) from error
        self._queue: deque[bytes] = deque()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._unsynced = False
        self._failed: OSError | None = None
        self._thread = threading.Thread(target=self._sync_regularly, name=f"sync {path.name}", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Append a text without blocking: during a sync it is queued in memory.

        EnvironmentFault if this text, or one queued earlier, cannot be written.
        """
        self._queue.append(text.encode())
        self._drain()
        if self._failed:
            raise self._fault(self._failed) from self._failed

    def sync(self) -> None:
        """Write the queue and sync the file to the disk or the bucket; OSError if that fails."""
        with self._lock:
            if not self._file.closed:
                self._write_queue()
                self._unsynced = False
                try:
                    os.fsync(self._file.fileno())
                except OSError:
                    self._unsynced = True
                    raise
        self._drain()

    def close(self) -> None:
        """Sync and close the file; warn if that fails."""
        self._closed.set()
        self._thread.join()
        self._sync_or_warn()
        with self._lock, suppress(OSError):  # the sync has reported the error already
            self._file.close()

    def _drain(self) -> None:
        """Write the queue, unless another thread holds the lock: that thread drains the queue after it releases the
        lock, so no text queued meanwhile is left behind."""
        while self._queue and not self._failed and self._lock.acquire(blocking=False):
            try:
                self._write_queue()
            except OSError as error:
                self._failed = error
            finally:
                self._lock.release()

    def _write_queue(self) -> None:
        while self._queue:
            left, self._unsynced = self._queue.popleft(), True
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
            self._warn(f"could not sync {self.path} to disk: {cause(error)}")

    def _pause(self) -> float:
        try:
            size = os.fstat(self._file.fileno()).st_size
        except OSError:  # the file system is gone: the next sync fails and is reported
            size = 0
        return max(self._every, size / RATE)

    def _fault(self, error: OSError) -> EnvironmentFault:
        return EnvironmentFault(f"cannot write to {self.path}: {cause(error)}", way_out(error))
