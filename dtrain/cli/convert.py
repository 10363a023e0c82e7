"""dtrain import, dtrain export"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dtrain.cli.arguments import Best, Debug, Devices, Overrides, Run, RunsDir, Step, use_devices
from dtrain.cli.exits import exits, interruptible
from dtrain.core.errors import RecipeError


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    example = "Example: dtrain import my-llama.yaml Llama-3.2-1B/ && dtrain run my-llama.yaml"
    app.command("import", epilog=example)(import_)
    app.command("export", epilog="Example: dtrain export runs/my-llama model.safetensors --names published")(export)


def import_(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a recipe that comes with dtrain.")
    ],
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A .safetensors file, a folder of such files, or a run folder.")
    ],
    overrides: Overrides = None,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Import even if the source's settings contradict the recipe's model."),
    ] = False,
    devices: Devices = None,
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    """Start a run from the parameters of another run or of a published model; `dtrain run` then trains it.

    A config.json next to published weights is compared with the recipe's model.
    """
    with exits(debug), interruptible():
        use_devices(devices)
        from dtrain.cli.recipes import find
        from dtrain.recipe.load import load
        from dtrain.train.convert import import_params

        if not source.exists():
            raise RecipeError(f"{source} does not exist")
        loaded = load(find(recipe), overrides or [], devices)
        place = import_params(loaded, runs_dir, source, _note, allow_changes=allow_changes)
        typer.secho(f"{place.path} starts with the parameters of {source}", fg="green", err=True)
        typer.secho("to train it: the same command line with run in place of import, and without SOURCE", err=True)


def export(
    run: Run,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The .safetensors file to write, or a folder for model.safetensors.")
    ],
    overrides: Overrides = None,
    names: Annotated[
        Literal["own", "published"], typer.Option(help="Parameter names: dtrain's own, or those of Hugging Face.")
    ] = "own",
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Of a run with lora, write the adapters alone; default: merged.")
    ] = False,
    step: Step = None,
    best: Best = False,
    devices: Devices = None,
    debug: Debug = False,
) -> None:
    """Write the parameters of one of a run's checkpoints to a file that other libraries read."""
    with exits(debug), interruptible():
        use_devices(devices)
        from dtrain.core.run_list import find_run
        from dtrain.train.export import export_params, target, write_config
        from dtrain.train.load import load_run

        path = target(file)
        loaded = load_run(find_run(run), overrides or [], _note, step=step, best=best)
        export_params(loaded, path, published=names == "published", adapters=adapters)
        size = path.stat().st_size / 1e6
        typer.secho(f"{path}: {run} at {loaded.chosen}, {size:,.1f} MB", fg="green", err=True)
        if names == "published":
            note = "it contains only tensors; give a folder in place of a file to write a config.json as well"
            _note(note if path == file else write_config(loaded.recipe.model, path.parent))


def _note(text: str) -> None:
    typer.echo(text, err=True)
