"""Checks of cost before something is rented: does the run fit, and is the time bounded."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.launch.job import LaunchJob, LaunchPlan

GIB = 2**30


def require_limit(found: "LaunchPlan") -> None:
    """RecipeError where something is paid by the hour and nothing bounds the hours."""
    from dtrain.core.errors import RecipeError

    if found.rented and found.hours is None:
        rate = f"{found.dollars_hour:,.2f} dollars an hour" if found.dollars_hour is not None else "rented machines"
        message = f"{rate} without a limit in hours or dollars"
        raise RecipeError(message, "set one, as launch.hours=24 or launch.budget=500; --no-limit starts it without")


def predict(job: "LaunchJob") -> None:
    """`dtrain plan --quick` for what is rented, in a line.

    RecipeError where the run cannot be laid out there or does not fit; where it cannot be planned for another reason,
    a line says so."""
    from dtrain.cli.launch_output import say
    from dtrain.core.errors import RecipeError

    if not job.target.get("on") or job.target.get("devices"):
        return
    if _custom(job):
        say("not predicted: the model is custom code, which runs only where the run does")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(job.recipe)
        done = _planned(path, job)
        reason = done.stderr.replace(f"{path}:", "").removeprefix("error: ").strip()
    if done.returncode == RecipeError.exit_code:
        raise RecipeError(f"on {job.target['on']}: {reason}", "--no-plan starts it without a prediction")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        say(f"not predicted: {(reason.splitlines() or ['no reason'])[-1]}")
        return
    say(_line(found))
    if not found["fits"]:
        raise RecipeError(
            f"it does not fit on {job.target['on']}",
            f"dtrain plan RECIPE --on {job.target['on']} --search looks for what does; --no-plan starts it anyway",
        )


def _custom(job: "LaunchJob") -> bool:
    from dtrain.recipe.yaml import parse

    return parse(job.recipe, "recipe").plain()["model"]["kind"] == "custom"


def _planned(path: Path, job: "LaunchJob") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dtrain", "plan", str(path), "--on", job.target["on"]]
    command += ["--slices", str(job.target.get("slices", 1)), "--quick", "--json", "--runs-dir", str(path.parent)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _line(found: dict[str, Any]) -> str:
    memory = found["memory_bytes"]
    parts = [f"predicted: {memory['peak'] / GIB:.2f} of {memory['room'] / GIB:.2f} GiB a device"]
    if "step_seconds" in found:
        parts.append(f"{found['step_seconds'] * 1e3:.1f} ms a step")
    if found.get("dollars"):
        parts.append(f"{found['dollars']['hours']:.1f} hours and {found['dollars']['total']:,.0f} dollars in all")
    return ", ".join(parts)
