"""Fake devices."""

import os
import subprocess
import sys

import pytest

from tests.conftest import bare_environment

FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"
PROGRAM = "import os; from dtrain.parallel.devices import fake_devices; fake_devices(2); print(os.environ['XLA_FLAGS'])"


@pytest.mark.parametrize("own", ["", f"{FLAG}=true", "--xla_backend_optimization_level=0"])
def test_programs_for_fake_devices_keep_the_order_of_collectives(own: str) -> None:
    """Unless the user says otherwise: with concurrency, many runs over `sequence` under jit end in a deadlock."""
    environment = bare_environment() | {"XLA_FLAGS": own}
    flags = subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True).split()
    assert set(own.split()) <= set(flags)
    assert [flag for flag in flags if flag.startswith(FLAG)] == [own if own.startswith(FLAG) else f"{FLAG}=false"]


def test_these_tests_run_with_it() -> None:
    assert f"{FLAG}=false" in os.environ["XLA_FLAGS"]
