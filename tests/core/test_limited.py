"""A function on untrusted input is called within limits of time and memory."""

import os
import time
from collections.abc import Callable

import pytest

from dtrain.core.errors import DataError
from dtrain.core.limited import OverLimit, limited


def test_results_and_errors_come_back() -> None:
    assert limited(lambda a, b: {"sum": a + b, "here": os.getpid()}, 1, 2)["sum"] == 3
    assert limited(os.getpid) != os.getpid()

    def fails() -> None:
        raise DataError("a.csv: no rows", "use more")

    with pytest.raises(DataError, match=r"a\.csv: no rows") as raised:
        limited(fails)
    assert raised.value.hint == "use more"


def test_a_bug_is_no_fault_of_the_data() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)test_limited\.py.*ZeroDivisionError"):
        limited(lambda: 1 // 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: time.sleep(60), "longer than 1 s"),
        (lambda: bytearray(b"x" * 2**29) and time.sleep(60), "more than 0 GiB of memory"),
        (lambda: os._exit(3), "its process died"),
    ],
)
def test_what_is_over_a_limit_is_ended(function: Callable[[], object], message: str) -> None:
    start = time.monotonic()
    with pytest.raises(OverLimit, match=message):
        limited(function, seconds=1 if "longer" in message else 30, most=2**28)
    assert time.monotonic() - start < 20
