"""Strictness for all: eight pretended devices, no silent broadcasting, warnings are errors."""

import fcntl
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import hypothesis
import pytest
from typer.testing import CliRunner

from dtrain.parallel.devices import configure_environment, fake_devices
from tests.forks import Forks

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # started in the background: what the tests start would not hear Ctrl-C either
    signal.signal(signal.SIGINT, signal.default_int_handler)
# the tests start hundreds of processes: each would compile all of dtrain's source again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if "DTRAIN_TEST_GPU" in os.environ:  # for the tests marked gpu: the real device
    configure_environment()
else:
    fake_devices(8)
# the tests compile much and compute little: all of XLA's passes, none of LLVM's, and the older emitters where there are
# two, which compile in half the time; with DTRAIN_TEST_OPTIMISED, commands that tests start compile as the user does
JAXLIB = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:3])
FLAGS = ["--xla_backend_optimization_level=0"]
FLAGS += ["--xla_cpu_use_fusion_emitters=false"] if JAXLIB < (0, 11, 1) else []
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

# folders of compiled programs for all test processes, also those of the next time; never the user's own
CACHE = Path(tempfile.gettempdir()) / f"dtrain-tests-{os.getuid()}"
os.environ["XDG_CACHE_HOME"] = str(CACHE / "tests")
os.environ["XDG_CONFIG_HOME"] = str(CACHE / "config")

import jax  # noqa: E402
from jax._src.lru_cache import LRUCache  # noqa: E402

from dtrain.parallel import compile_cache  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
with patch.object(compile_cache, "ENTRIES", 20_000):  # all tests together have more programs than a user
    assert not compile_cache.use()
# JAX reads the time of last use of every entry whenever it writes one: a third of a second with those of all tests
LRUCache._evict_if_needed = lambda *_, **__: None  # pyright: ignore
os.environ["XDG_CACHE_HOME"] = str(CACHE / "commands")  # each command that a test starts keeps to a user's number

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

SHARED = Path(__file__).parents[2] / "shared"
"""Real data beside the checkout; tests that use it are skipped where it is absent."""


@pytest.fixture(autouse=True)
def _no_cache_for_absent_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX writes programs for devices that are not there into its cache, and cannot read them back."""
    absent = any(request.node.get_closest_marker(name) for name in ("tpu_compiler", "gpu_compiler"))
    with compile_cache.off() if absent else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _forget_modules_of_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules that a test wrote and imported; the next one may have others of the same names."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path_factory.getbasetemp()):
            del sys.modules[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make golden` runs the tests that have a golden, and no other."""
    if os.environ.get("DTRAIN_GOLDEN") == "write":
        items[:] = [item for item in items if "golden" in getattr(item, "fixturenames", ())]


@pytest.fixture
def mnist() -> Path:
    """The folder of the real MNIST files."""
    folder = SHARED / "data" / "mnist"
    if not folder.is_dir():
        pytest.skip("the MNIST files are not beside this checkout")
    return folder


def bare_environment() -> dict[str, str]:
    """The environment without what these tests set for themselves."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "PJRT_", "XLA_", "DTRAIN_"))}
    flags = {} if os.environ.get("DTRAIN_TEST_OPTIMISED") else {"XLA_FLAGS": " ".join(FLAGS)}
    return kept | flags | {"NO_COLOR": "1", "COLUMNS": "120"}


PACED = {"DTRAIN_FAULT": "pace@step"}
"""For runs that train until they are stopped: they leave the processor to other tests."""


@contextmanager
def alone(what: str) -> Iterator[None]:
    """One test process at a time: for what a machine can have but once."""
    with (Path(tempfile.gettempdir()) / f"dtrain-tests-{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


Dtrain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Processes that have imported the command line."""
    server = Forks(bare_environment())
    yield server
    server.close()


@pytest.fixture
def dtrain(tmp_path: Path, forks: Forks) -> Dtrain:
    """Run the command line in a process of its own, in an empty folder."""

    def call(
        *arguments: str | Path, code: int = 0, seconds: float = 200, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        words = list(map(str, arguments))
        done = forks.run(words, cwd=tmp_path, environment=bare_environment() | environment, seconds=seconds)
        assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
        if code not in (0, 70):
            assert "Traceback" not in done.stderr
        return done

    return call


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dtrain:
    """Run the command line in this process, in an empty folder: for verbs that set up no devices and start no run."""

    def call(
        *arguments: str | Path, code: int = 0, seconds: float = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        from dtrain.cli import app

        del seconds
        words = [str(word) for word in arguments]
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            for name, value in ({"NO_COLOR": "1", "COLUMNS": "120"} | environment).items():
                patch.setenv(name, value)
            done = CliRunner().invoke(app, words)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, f"exit code {done.exit_code}, not {code}\n{done.stdout}\n{done.stderr}"
        return subprocess.CompletedProcess(words, code, done.stdout, done.stderr)

    return call


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Hold a text against tests/golden/NAME; `make golden` rewrites it."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if os.environ.get("DTRAIN_GOLDEN") == "write":
            path.write_text(text)
        assert text == path.read_text(), f"{name} changed; if that is meant, run `make golden` and review the diff"

    return compare
