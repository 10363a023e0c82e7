"""Whether a run fits what is about to be rented for it, said before it is paid for."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.launch.job import Job

GIB = 2**30


def foretell(job: "Job") -> None:
    """`dtrain plan --quick` for what is rented, in a line.

    RecipeError where the run cannot be laid out there or does not fit; where it cannot be planned for another reason,
    that is told, and no more."""
    from dtrain.cli.launch_output import say
    from dtrain.errors import RecipeError

    if not job.section.get("on") or job.section.get("devices"):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(job.recipe)
        done = _planned(path, job)
        reason = done.stderr.replace(f"{path}:", "").removeprefix("error: ").strip()
    if done.returncode == RecipeError.exit_code:
        raise RecipeError(f"on {job.section['on']}: {reason}", "--no-plan does not look")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        say(f"not foretold: {(reason.splitlines() or ['no reason'])[-1]}")
        return
    say(_line(found))
    if not found["fits"]:
        raise RecipeError(
            f"it does not fit on {job.section['on']}",
            f"dtrain plan RECIPE --on {job.section['on']} looks for what does; --no-plan does not look",
        )


def _planned(path: Path, job: "Job") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dtrain", "plan", str(path), "--on", job.section["on"]]
    command += ["--slices", str(job.section.get("slices", 1)), "--quick", "--json", "--runs-dir", str(path.parent)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _line(found: dict[str, Any]) -> str:
    memory = found["memory_bytes"]
    said = [f"foretold: {memory['peak'] / GIB:.2f} of {memory['room'] / GIB:.2f} GiB a device"]
    if "step_seconds" in found:
        said.append(f"{found['step_seconds'] * 1e3:.1f} ms a step")
    if found.get("dollars"):
        said.append(f"{found['dollars']['hours']:.1f} hours and {found['dollars']['total']:,.0f} dollars in all")
    return ", ".join(said)
