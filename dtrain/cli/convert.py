"""dtrain import, dtrain export"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dtrain.cli.arguments import Best, Debug, Devices, Overrides, RunsDir, Step
from dtrain.cli.exits import exits, interruptible
from dtrain.core.errors import RecipeError


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    example = "Example: dtrain import my-llama.yaml Llama-3.2-1B/ && dtrain run my-llama.yaml"
    app.command("import", epilog=example)(bring)
    app.command("export", epilog="Example: dtrain export runs/my-llama model.safetensors --names published")(take)


def bring(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's path, or the name of one of dtrain's.")],
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A .safetensors file, a folder of such files, or a run's folder.")
    ],
    overrides: Overrides = None,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Import even where the source's settings contradict the recipe's model."),
    ] = False,
    devices: Devices = None,
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    """Start a run from the parameters of another run or of a published model; `dtrain run` then trains it.

    A config.json beside published weights is compared with the recipe's model.
    """
    with exits(debug), interruptible():
        _settle(devices)
        from dtrain.cli.recipes import find
        from dtrain.recipe.load import load
        from dtrain.train.convert import import_params as brought

        if not source.exists():
            raise RecipeError(f"{source} does not exist")
        loaded = load(find(recipe), overrides or [], devices)
        place = brought(loaded, runs_dir, source, _note, allow_changes=allow_changes)
        typer.secho(f"{place.path} begins with the parameters of {source}", fg="green", err=True)
        typer.secho("train it with the same command line: dtrain run in place of import, without the file", err=True)


def take(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The .safetensors file to write; in a folder, model.safetensors.")
    ],
    overrides: Overrides = None,
    names: Annotated[
        Literal["own", "published"], typer.Option(help="dtrain's names, or those of Hugging Face's checkpoints.")
    ] = "own",
    step: Step = None,
    best: Best = False,
    devices: Devices = None,
    debug: Debug = False,
) -> None:
    """Write the parameters of one of a run's checkpoints to a file that other libraries read."""
    with exits(debug), interruptible():
        _settle(devices)
        from dtrain.core.run_dir import Folder
        from dtrain.train.convert import export_params as taken
        from dtrain.train.convert import target, write_config
        from dtrain.train.load import load_run

        path = target(file)
        found = load_run(Folder(run), overrides or [], _note, step=step, best=best)
        taken(found, path, published=names == "published")
        size = path.stat().st_size / 1e6
        typer.secho(f"{path}: {run} at {found.chosen}, {size:,.1f} MB", fg="green", err=True)
        if names == "published":
            alone = "it holds tensors alone; with a folder in place of a file, export writes a config.json too"
            _note(alone if path == file else write_config(found.recipe.model, path.parent))


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _settle(devices: int | None) -> None:
    import logging

    from dtrain.parallel import compile_cache
    from dtrain.parallel.devices import found, pretend

    if devices:
        pretend(devices)
    logging.getLogger("absl").setLevel(logging.ERROR)
    found()
    compile_cache.use()
