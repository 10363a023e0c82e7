"""Plans in separate processes."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dtrain.core.errors import DtrainError, EnvironmentFault, RecipeError
from dtrain.plan.workers import outcomes
from tests.waiting import until


@dataclass(frozen=True)
class Stub:
    """What a worker process does in place of a plan."""

    what: str

    def make(self) -> Any:
        if self.what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "is refused":
            return RecipeError("no", "yes")
        if self.what.startswith("reports "):
            Path(self.what.removeprefix("reports ")).write_text(str(os.getpid()))
        if self.what.startswith(("sleeps", "reports ")):
            time.sleep(600)
        return self.what


def made(*whats: str, workers: int = 2) -> dict[int, Any]:
    return dict(outcomes([Stub(what) for what in whats], workers))  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_compiler_that_crashes_ends_only_its_own_process() -> None:
    found = made("dies", "fine", "is refused")
    assert isinstance(found[0], EnvironmentFault)
    assert "signal 9" in found[0].message
    assert found[1] == "fine"
    assert isinstance(found[2], RecipeError)
    assert (found[2].message, found[2].hint) == ("no", "yes")


@pytest.mark.slow
def test_closing_the_generator_ends_the_workers() -> None:
    start = time.perf_counter()
    running = outcomes([Stub("sleeps"), Stub("fine")], 2)  # pyright: ignore[reportArgumentType]
    assert next(running) == (1, "fine")
    running.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert time.perf_counter() - start < 50


@pytest.mark.slow
def test_a_caller_that_is_killed_leaves_no_worker(tmp_path: Path) -> None:
    values = tmp_path / "pid"
    program = f"import tests.plan.test_workers as w; list(w.outcomes([w.Stub('reports {values}')], 1))"
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    until(lambda: values.exists() and values.read_text())
    caller.kill()
    caller.wait()
    worker = Path(f"/proc/{values.read_text()}")
    until(lambda: not worker.exists(), "the worker lives on")


def test_every_error_crosses_a_process_whole() -> None:
    import pickle

    from dtrain.core.errors import FieldError

    for error in (DtrainError("a", "b"), RecipeError(["a", "b"], "c"), FieldError("f", "m", "h")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert vars(again) == vars(error)
