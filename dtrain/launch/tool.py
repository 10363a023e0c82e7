"""Commands of other programs: run without a shell, their failures told in their own words."""

import subprocess
from collections.abc import Sequence

from dtrain.errors import EnvironmentFault

WAIT = 120.0


def run(command: Sequence[str], *, given: str | None = None, wait: float = WAIT) -> str:
    """What it printed. EnvironmentFault where the program is missing, fails, or takes too long."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=wait, check=False)
    except FileNotFoundError as error:
        raise EnvironmentFault(
            f"{command[0]} is not installed here", f"it is needed for {' '.join(command[:4])}"
        ) from error
    except OSError as error:
        raise EnvironmentFault(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"{' '.join(command[:4])} did not answer in {wait:.0f} s") from error
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise EnvironmentFault(f"{' '.join(command[:4])} failed ({done.returncode}): " + " ".join(said[-4:]))
    return done.stdout
