"""Checks before machines are rented: the run fits, and its time is limited."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.core.counts import counted
from dtrain.core.types import JsonObject

if TYPE_CHECKING:
    from dtrain.launch.job import LaunchJob, LaunchPlan

GIB = 2**30


def require_limit(plan: "LaunchPlan") -> None:
    """RecipeError if machines are paid by the hour and there is no limit on the hours."""
    from dtrain.core.errors import RecipeError

    if plan.rented and plan.hours is None:
        rate = f"{plan.dollars_hour:,.2f} dollars an hour" if plan.dollars_hour is not None else "rented machines"
        message = f"{rate} without a limit in hours or dollars"
        raise RecipeError(
            message, "set one, as launch.hours=24 or launch.budget=500; --no-limit starts without a limit"
        )


def refuse_layout(job: "LaunchJob", plan: "LaunchPlan") -> None:
    """RecipeError if the run cannot be laid out over the devices, where their number is known before it starts: it
    would wait in a queue only to be refused there."""
    from dtrain.core.errors import RecipeError
    from dtrain.recipe.load import load

    devices = job.target.get("devices") or job.target.get("gpus", 0) * plan.hosts
    processes = job.target.get("processes", 1) * plan.hosts
    if not devices or _custom(job):
        return
    if devices % processes:
        message = f"launch: {counted(devices, 'device')} cannot be divided over {processes} processes"
        raise RecipeError(message, f"use {processes} devices or a multiple, or fewer processes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(job.recipe)
        try:
            load(path, [], devices)
        except RecipeError as error:
            raise RecipeError(f"on {devices} devices: {_without_place(error.message, path)}", error.hint) from error


def _without_place(reason: str, path: Path) -> str:
    """A reason without the places in a file that was written here."""
    return re.sub(r"^\d+:\d+\s+", "", reason.replace(f"{path}:", "").removeprefix("error: ").strip())


def predict(job: "LaunchJob", plan: "LaunchPlan") -> JsonObject | None:
    """The result of `dtrain plan --quick` for the rented machines, after a line that says it, and one if the limit on
    hours ends the run before its last step.

    RecipeError if the run cannot be laid out there. None if nothing is rented, or if it cannot be planned for another
    reason, which is printed."""
    from dtrain.cli.launch_output import say
    from dtrain.core.errors import RecipeError

    if not job.target.get("on") or job.target.get("devices"):
        return None
    if _custom(job):
        say("not predicted: the model or the data is custom code, which dtrain executes only in the run itself")
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(job.recipe)
        done = _planned(path, job)
        reason = _without_place(done.stderr, path)
    if done.returncode == RecipeError.exit_code:
        on, reason = job.target["on"], reason.partition("\nmore:")[0]
        several = f" --slices {count}" if (count := job.target.get("slices", 1)) > 1 else ""
        raise RecipeError(f"on {on}: {reason}", f"`dtrain plan RECIPE --on {on}{several}` names its line")
    try:
        prediction = json.loads(done.stdout)
    except ValueError:
        say(f"not predicted: {(reason.splitlines() or ['no reason'])[-1]}")
        return None
    say(_line(prediction))
    needed = prediction["dollars"]["hours"] if prediction.get("dollars") else 0.0
    if plan.hours is not None and needed > plan.hours:
        share, steps = plan.hours / needed, prediction["dollars"]["steps"]
        end = f"the limit of {plan.hours:.3g} hours ends the run at about {share:.0%}, step {steps * share:,.0f}"
        say(f"{end} of {steps:,}: it saves there, and resumes with a higher launch.hours or launch.budget")
    return prediction


def refuse_too_large(job: "LaunchJob", prediction: JsonObject | None) -> None:
    """RecipeError if it is predicted that the run does not fit."""
    from dtrain.core.errors import RecipeError

    if prediction and not prediction["fits"]:
        on, larger = job.target["on"], prediction.get("smallest_slice")
        way = f"--on {on} --search looks for a layout that fits"
        if larger and larger != on:
            way = f"--on {larger}: the smallest slice that holds parameters and optimizer state"
        hint = f"dtrain plan RECIPE {way}; --no-plan starts it anyway"
        if prediction["verdict"] == "may fit":
            hint = f"this is arithmetic, and close: `dtrain plan RECIPE --on {on}` compiles and is sure; {hint}"
        may = "may not fit" if prediction["verdict"] == "may fit" else "does not fit"
        raise RecipeError(f"the run {may} on {on}", hint)


def _custom(job: "LaunchJob") -> bool:
    from dtrain.recipe.yaml import parse

    recipe = parse(job.recipe, "recipe").plain()
    return "custom" in {recipe["model"]["kind"], recipe["data"]["kind"]}


def _planned(path: Path, job: "LaunchJob") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dtrain", "plan", str(path), "--on", job.target["on"]]
    command += ["--slices", str(job.target.get("slices", 1)), "--quick", "--json", "--runs-dir", str(path.parent)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _line(prediction: JsonObject) -> str:
    memory = prediction["memory_bytes"]
    parts = [f"predicted: {memory['peak'] / GIB:.2f} of {memory['room'] / GIB:.2f} GiB a device"]
    if "step_seconds" in prediction:
        parts.append(f"{prediction['step_seconds'] * 1e3:.1f} ms a step")
    if prediction.get("dollars"):
        parts.append(
            f"{prediction['dollars']['hours']:.1f} hours and {prediction['dollars']['total']:,.0f} dollars in all"
        )
    return ", ".join(parts)
