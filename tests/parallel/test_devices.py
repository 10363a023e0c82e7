"""Fake devices."""

import os
import subprocess
import sys

import pytest

from tests.conftest import bare_environment

STALL = "--xla_cpu_collective_call_terminate_timeout_seconds"
PROGRAM = "import os; from dtrain.parallel.devices import fake_devices; fake_devices(2); print(os.environ['XLA_FLAGS'])"


@pytest.mark.parametrize("own", ["", f"{STALL}=5", "--xla_backend_optimization_level=0"])
def test_fake_devices_wait_for_a_slow_one_unless_the_user_says_otherwise(own: str) -> None:
    environment = bare_environment() | {"XLA_FLAGS": own}
    flags = subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True).split()
    assert set(own.split()) <= set(flags)
    assert [flag for flag in flags if flag.startswith(STALL)] == [own if own.startswith(STALL) else f"{STALL}=3600"]


def test_these_tests_run_with_it() -> None:
    assert STALL in os.environ["XLA_FLAGS"]
