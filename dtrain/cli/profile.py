"""dtrain profile"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli import completion
from dtrain.cli.arguments import RUNS, Debug, Devices, Json, Overrides, RunsDir, load_to_measure
from dtrain.cli.exits import exits, interruptible

if TYPE_CHECKING:
    from dtrain.core.run_dir import Folder

PATIENCE = 600.0
"""Seconds that a live run has to profile itself."""
LOOK = 0.5


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain profile mlp-digits --steps 20")(profile)


def profile(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RUN|RECIPE",
            help="A run that trains now, or a recipe.",
            autocompletion=completion.runs_and_recipes,
        ),
    ],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps to trace.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for the trace of a recipe.")] = Path("profile"),
    devices: Devices = None,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Trace some steps: the largest operations, idle devices, collectives, waiting for data, and what to change.

    A run that trains now is asked to trace its next steps. A recipe is trained for a few steps, and nothing but the
    trace is kept.
    """
    with exits(debug), interruptible():
        from dtrain.core.errors import RecipeError
        from dtrain.core.lease import in_use
        from dtrain.core.run_dir import Folder
        from dtrain.core.run_list import is_run
        from dtrain.core.shipped import shipped

        run_dir = next((Folder(path) for path in (Path(what), runs_dir / what) if is_run(path)), None)
        if run_dir and in_use(run_dir.lease) and not overrides:
            _live(run_dir, steps, as_json)
        elif run_dir and not Path(what).is_file() and what not in shipped():
            raise RecipeError(f"{run_dir.path} does not train now", f"profile its recipe: {run_dir.recipe}")
        else:
            _recipe(what, overrides or [], steps, out, devices, as_json)


def _live(run_dir: "Folder", steps: int, as_json: bool) -> None:
    import time

    from dtrain.core.errors import EnvironmentFault
    from dtrain.core.files import overwrite, read_json

    summary = run_dir.profile / "summary.json"
    before = summary.stat().st_mtime_ns if summary.exists() else 0
    overwrite(run_dir.profile_request, json.dumps({"steps": steps}) + "\n")
    typer.echo(f"{run_dir.path} traces its next {steps} steps ...", err=True)
    end = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < end:
            if summary.exists() and summary.stat().st_mtime_ns != before:
                values = read_json(summary)
                typer.echo(json.dumps(values, indent=2) if as_json else "\n".join(values["text"]))
                return
            time.sleep(LOOK)
    finally:
        run_dir.profile_request.unlink(missing_ok=True)
    raise EnvironmentFault(f"{run_dir.path} did not trace within {PATIENCE:.0f} s", "is it between two steps?")


def _recipe(recipe: str, overrides: list[str], steps: int, out: Path, devices: int | None, as_json: bool) -> None:
    import shutil

    first = 6
    last = first + steps - 1
    traced = [f"track.every={last}", "track.to=[]", f"profile={{start: {first}, steps: {steps}}}"]
    loaded = load_to_measure(recipe, [*overrides, *traced], devices, last)
    from dtrain.core.errors import EnvironmentFault, cause
    from dtrain.core.files import overwrite, read_json
    from dtrain.core.leftovers import temporary_folder
    from dtrain.track.console import Console
    from dtrain.train.run import run as train

    with temporary_folder("profile") as folder:
        run_dir = train(loaded, folder, Console(silent=True))
        assert run_dir is not None
        try:
            shutil.copytree(run_dir.profile, out, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise EnvironmentFault(f"cannot write {out}: {cause(error)}", "another folder: --out") from error
    values = read_json(out / "summary.json")
    newest = max(out.rglob("perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime)
    values["text"][-1] = f"  trace: {newest.parent}; ui.perfetto.dev opens {newest.name}"
    overwrite(out / "summary.json", json.dumps(values, indent=2) + "\n")  # the trace is here, not where it was made
    typer.echo(json.dumps(values, indent=2) if as_json else "\n".join(values["text"]))
