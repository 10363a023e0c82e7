"""Waiting in tests: for an event, never for a time."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], failure: str = "it did not happen", seconds: float = 200) -> None:
    """Return as soon as `holds()` is true; the test fails with `failure` if that takes too long."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, failure
        time.sleep(0.02)
