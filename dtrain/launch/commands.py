"""Run other programs without a shell and report their error messages; read log files while they grow."""

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dtrain.core.errors import EnvironmentFault
from dtrain.core.files import read_regular

WAIT = 120.0
HINTS = {
    "gcloud auth login|active account|Reauthentication|invalid_grant": "gcloud auth login",
    "RESOURCE_EXHAUSTED|[Qq]uota": "request more quota, or use less, or another zone",
    "ZONE_RESOURCE_POOL_EXHAUSTED|no more capacity": "try another zone, or `spot: false`",
    "PERMISSION_DENIED|permission": "request the role that the message names, or use another project",
    "Could not connect to SkyPilot API server": "`sky api info` shows which server; launch.server names another",
    "connect(ion)? to the server|current-context|context .*(not found|not exist)|no configuration": (
        "gcloud container clusters get-credentials CLUSTER"
    ),
    "resource type .jobset|no matches for kind .JobSet": "install JobSet: https://jobset.sigs.k8s.io/docs/installation",
}
"""Hints for the user, by a pattern in the standard error of a program."""
INSTALL = {"sky": 'uv tool install "skypilot[gcp]==0.14.1"'}
"""How to install a program."""
KLOG = re.compile(r"[IWE]\d{4} ")
"""Start of the log lines that kubectl prints before its error message."""
CAUSED = "direct cause of the following exception:"
"""Precedes the last exception of a chain in a Python traceback."""


def run(
    command: Sequence[str],
    *,
    given: str | None = None,
    wait: float = WAIT,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command and return its standard output; `given` is its standard input. EnvironmentFault if the program is
    missing, fails, or takes longer than `wait` seconds."""
    shown = " ".join(command[:4])
    try:
        done = subprocess.run(
            command, input=given, stdin=subprocess.DEVNULL if given is None else None, capture_output=True,
            text=True, timeout=wait, env=environment, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        hint = INSTALL.get(command[0], f"it is needed for {shown}")
        raise EnvironmentFault(f"{command[0]} is not installed here", hint) from error
    except OSError as error:
        raise EnvironmentFault(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"{shown} did not answer in {wait:.0f} s") from error
    if done.returncode:
        hint = next((hint for pattern, hint in HINTS.items() if re.search(pattern, done.stderr)), "")
        raise EnvironmentFault(f"{shown} failed ({done.returncode}): {_reason(done.stderr)}", hint)
    return done.stdout


def text_of(path: Path) -> str:
    """The text of a file. EnvironmentFault if it cannot be read."""
    try:
        return read_regular(path).decode(errors="replace")
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {error.strerror}") from error


def follow_log(
    log: Path, offset: int, over: Callable[[], bool], wait: Callable[[], object]
) -> Iterator[tuple[int, str]]:
    """Yield (offset after the line, line) of a log from byte `offset`, until `over()` or `wait()` returns true.

    `wait` is called after each read to the end of the file. A missing file is read as empty."""
    while True:
        last = over()
        with suppress(FileNotFoundError), log.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n") and not last:
                    break
                offset += len(line)
                yield offset, line.decode(errors="replace").rstrip("\n")
        if last or wait():
            return


FRAME = " \t│╷╵"
"""What terraform draws around its messages."""


def _reason(stderr: str) -> str:
    """Up to four lines: from the first one that starts with "error" in any case, otherwise the last ones."""
    last = stderr.rpartition(CAUSED)[2]
    stripped = [line.strip(FRAME) for line in last.splitlines() if not KLOG.match(line)]
    lines = [line for line in stripped if line]
    first = next((i for i, line in enumerate(lines) if line.lower().startswith("error")), max(len(lines) - 4, 0))
    return " ".join(lines[first : first + 4])
