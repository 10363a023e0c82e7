"""Mount the bucket of `server.py` for a test, or skip the test if that is not possible."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bucket.objects import operations

DETACH = 2


@dataclass(frozen=True)
class Mount:
    """A mounted bucket."""

    point: Path
    journal: Path
    server: subprocess.Popen[str]

    def lose(self) -> None:
        """Simulate the loss of the machine: nothing more is uploaded."""
        self.server.kill()
        self.server.wait()

    def uploads(self, path: str) -> int:
        """How many times an object was uploaded."""
        return sum(one["do"] == "put" and one["path"] == path for one in operations(self.journal))


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Mount]:
    """Mount the bucket whose journal is in this folder, with its own server process."""
    point = folder / "mounted"
    point.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.bucket.server", str(folder / "journal"), str(point), *options]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as server:  # fmt: skip
        assert server.stdout
        assert server.stderr
        try:
            if server.stdout.readline() != "mounted\n":
                why = server.stderr.read().strip().splitlines()[-1:]
                pytest.skip(
                    f"a FUSE file system cannot be mounted here, for which root and /dev/fuse are needed: {why}"
                )
            yield Mount(point, folder / "journal", server)
        finally:
            server.kill()
            server.wait()
            ctypes.CDLL(None).umount2(os.fsencode(point), DETACH)
