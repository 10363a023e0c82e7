"""Commands of other programs: run without a shell, their failures shown in their own words; and logs, as they grow."""

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dtrain.core.errors import EnvironmentFault

WAIT = 120.0
HINTS = {
    "gcloud auth login|active account|Reauthentication|invalid_grant": "gcloud auth login",
    "RESOURCE_EXHAUSTED|[Qq]uota": "request more quota, or use less, or another zone",
    "ZONE_RESOURCE_POOL_EXHAUSTED|no more capacity": "another zone, or `spot: false`",
    "PERMISSION_DENIED|permission": "request the role that is named, or use another project",
    "Could not connect to SkyPilot API server": "`sky api info` shows which server; launch.server names another",
    "connect(ion)? to the server|current-context|context .*(not found|not exist)|no configuration": (
        "gcloud container clusters get-credentials CLUSTER"
    ),
    "resource type .jobset|no matches for kind .JobSet": "install JobSet: https://jobset.sigs.k8s.io/docs/installation",
}
"""What helps, by a pattern in what a program printed."""
INSTALL = {"sky": 'uv tool install "skypilot[gcp]==0.14.1"'}
"""How to get a program."""
KLOG = re.compile(r"[IWE]\d{4} ")
"""The log that kubectl prints before its message."""
CAUSED = "direct cause of the following exception:"
"""Before the last exception of several that a Python program prints."""


def run(
    command: Sequence[str],
    *,
    given: str | None = None,
    wait: float = WAIT,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Its standard output; `given` is its standard input. EnvironmentFault where the program is missing, fails, or
    takes longer than `wait` seconds."""
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


def followed(log: Path, offset: int, over: Callable[[], bool], wait: Callable[[], object]) -> Iterator[tuple[int, str]]:
    """(offset after it, line) of a log from `offset` on, until `over`, or until what `wait` returns is true."""
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


def _reason(stderr: str) -> str:
    """From the first line that calls itself an error, where there is one; else the last ones."""
    last = stderr.rpartition(CAUSED)[2]
    lines = [line.strip() for line in last.splitlines() if line.strip() and not KLOG.match(line)]
    first = next((i for i, line in enumerate(lines) if line.startswith("ERROR")), max(len(lines) - 4, 0))
    return " ".join(lines[first : first + 4])
