"""Starts the command line by a fork of a process that has imported it, in place of a new interpreter.

The import of JAX and of what a run needs takes half of the CPU time of a short run. A fork has its own memory, signals,
environment, folder and exit code, as a new process has. Not its own: the seed of Python's string hashes, and what JAX
reads from the environment while it is imported. Tests of these, of signals and of the start itself use `subprocess`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

IMPORTED_EARLY = ("JAX_", "XLA_", "PJRT_", "LIBTPU_", "PYTHON", "LD_", "OMP_", "MALLOC_", "TPU_")
"""Beginnings of the names of variables that are read once, while a process starts or imports."""
MODULES = [
    "jax._src.interpreters.mlir",
    "jaxlib.mlir.dialects._mhlo_ops_gen",
    "optax",
    "orbax.checkpoint",
    "grain",
    "rich.progress",
    "dtrain.cli",
    "dtrain.recipe.load",
    "dtrain.train.run",
]
"""What a run imports, and what takes time."""


class Forks:
    """A server that has imported the command line, and the client that asks it for processes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dtrain-forks-")
        self._address = str(Path(self._folder.name) / "server")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen()
        # OpenBLAS would start threads, which a fork does not have
        self._environment = dict(environment)
        started = self._environment | {"OPENBLAS_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())], pass_fds=[listener.fileno()], env=started
        )
        listener.close()

    def run(
        self, arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m dtrain` with these arguments; like `subprocess.run` with captured text."""
        changed = {name for name, _ in self._environment.items() ^ environment.items()}
        if any(name.startswith(IMPORTED_EARLY) for name in changed):
            command = [sys.executable, "-m", "dtrain", *arguments]
            return subprocess.run(
                command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        with (
            socket.socket(socket.AF_UNIX) as link,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            link.connect(self._address)
            link.settimeout(seconds)
            request = {"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment)}
            socket.send_fds(link, [b"!"], [out.fileno(), err.fileno()])
            link.sendall(json.dumps(request).encode() + b"\n")
            with link.makefile("r") as answers:
                process = int(answers.readline())
                try:
                    status = int(answers.readline())
                except TimeoutError:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(list(arguments), seconds) from None
            out.seek(0)
            err.seek(0)
            code = os.waitstatus_to_exitcode(status)
            return subprocess.CompletedProcess(list(arguments), code, out.read().decode(), err.read().decode())

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.wait()
        self._folder.cleanup()


def serve(listener: socket.socket) -> None:
    """Answer each connection with a process: a child waits for the command, which is its own child."""
    import importlib
    import warnings

    from dtrain.parallel.devices import configure_environment

    configure_environment()
    for name in MODULES:
        importlib.import_module(name)
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # JAX has no threads before its first backend
    tasks = len(list(Path("/proc/self/task").iterdir()))
    assert tasks == 1, f"{tasks} threads: a fork would have one of them"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while True:
        link, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _wait(link)
        link.close()


def _wait(link: socket.socket) -> None:
    """Start the command that the connection asks for, and send its process id and its status."""
    _, files, _, _ = socket.recv_fds(link, 1, 2)
    with link.makefile("r") as lines:
        request = json.loads(lines.readline())
    process = os.fork()
    if process == 0:
        link.close()
        _command(request, files)
    link.sendall(f"{process}\n".encode())
    _, status = os.waitpid(process, 0)
    with suppress(BrokenPipeError):
        link.sendall(f"{status}\n".encode())
    os._exit(0)


def _command(request: dict[str, Any], files: Sequence[int]) -> None:
    """Be `python -m dtrain`."""
    import runpy

    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, *files)):
        os.dup2(file, number)
        if file > 2:
            os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = ["dtrain", *request["arguments"]]
    sys.path[0] = request["cwd"]
    runpy.run_module("dtrain", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
