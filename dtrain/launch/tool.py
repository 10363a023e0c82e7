"""Commands of other programs: run without a shell, their failures told in their own words."""

import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dtrain.errors import EnvironmentFault

WAIT = 120.0
HINTS = {
    "gcloud auth login|active account|Reauthentication|invalid_grant": "gcloud auth login",
    "RESOURCE_EXHAUSTED|[Qq]uota": "ask for more quota, for less, or in another zone",
    "ZONE_RESOURCE_POOL_EXHAUSTED|no more capacity": "another zone, `spot: false`, or launch.kind: queued, which waits",
    "PERMISSION_DENIED|permission": "ask for the role that is named, or another project",
    "connection to the server|current-context|no configuration": "gcloud container clusters get-credentials CLUSTER",
}
"""What helps, by what a program says."""


def run(
    command: Sequence[str],
    *,
    given: str | None = None,
    wait: float = WAIT,
    folder: Path | None = None,
    patient: bool = False,
) -> str:
    """What it printed, run in a folder. EnvironmentFault where the program is missing, fails, or takes too long."""
    try:
        done = _done(command, given, wait, folder, patient)
    except FileNotFoundError as error:
        raise EnvironmentFault(
            f"{command[0]} is not installed here", f"it is needed for {' '.join(command[:4])}"
        ) from error
    except OSError as error:
        raise EnvironmentFault(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"{' '.join(command[:4])} did not answer in {wait:.0f} s") from error
    if done.returncode:
        raise EnvironmentFault(
            f"{' '.join(command[:4])} failed ({done.returncode}): {_reason(done.stderr)}", _help(done)
        )
    return done.stdout


def _done(
    command: Sequence[str], given: str | None, wait: float, folder: Path | None, patient: bool
) -> subprocess.CompletedProcess[str]:
    """With `patient` it is asked to end, by Ctrl-C or at the end of its time, and then waited for: what it has begun to
    make it must also note."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL if given is None else subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=patient,
    )  # fmt: skip
    with process:
        try:
            said = process.communicate(given, timeout=wait)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            if patient:
                process.send_signal(signal.SIGINT)
            else:
                process.kill()
            process.communicate()
            raise
    return subprocess.CompletedProcess(command, process.returncode, *said)


def _reason(said: str) -> str:
    """From the first line that calls itself an error, where there is one; else the last ones."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if line.startswith("ERROR")), max(len(lines) - 4, 0))
    return " ".join(lines[first : first + 4])


def _help(done: subprocess.CompletedProcess[str]) -> str:
    return next((hint for sign, hint in HINTS.items() if re.search(sign, done.stderr)), "")
