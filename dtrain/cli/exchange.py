"""dtrain import, dtrain export"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dtrain.cli.arguments import Debug, Devices, Overrides, RunsDir
from dtrain.cli.exits import exits
from dtrain.errors import RecipeError


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    example = "Example: dtrain import my-llama.yaml Llama-3.2-1B/ && dtrain run my-llama.yaml"
    app.command("import", epilog=example)(bring)
    app.command("export", epilog="Example: dtrain export runs/my-llama model.safetensors --names published")(take)


def bring(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's path, or the name of one of dtrain's.")],
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors file, or a folder of several.")],
    overrides: Overrides = None,
    devices: Devices = None,
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    """Begin a run with parameters of another one, or of a published model; `dtrain run` goes on from there."""
    with exits(debug):
        _settle(devices)
        from dtrain.cli.recipes import find
        from dtrain.exchange import bring as brought
        from dtrain.recipe.load import load

        if not source.exists():
            raise RecipeError(f"{source} does not exist")
        loaded = load(find(recipe), overrides or [], devices)
        place = brought(loaded, runs_dir, source, lambda text: typer.echo(text, err=True))
        typer.secho(f"{place.path} begins with the parameters of {source}", fg="green", err=True)
        typer.secho("train it with the same command line: dtrain run in place of import, without the file", err=True)


def take(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The .safetensors file to write.")],
    overrides: Overrides = None,
    names: Annotated[
        Literal["own", "published"], typer.Option(help="dtrain's names, or those of Hugging Face's checkpoints.")
    ] = "own",
    devices: Devices = None,
    debug: Debug = False,
) -> None:
    """Write the parameters of a run's newest checkpoint to one file that other libraries read."""
    with exits(debug):
        _settle(devices)
        from dtrain.exchange import take as taken
        from dtrain.folder import Folder
        from dtrain.trained import trained

        found = trained(Folder(run), overrides or [], lambda text: typer.echo(text, err=True))
        taken(found, file, published=names == "published")
        typer.secho(f"{file}: {run} at step {found.step}, {file.stat().st_size / 1e6:,.1f} MB", fg="green", err=True)


def _settle(devices: int | None) -> None:
    import logging

    from dtrain.parallel.devices import found, pretend

    if devices:
        pretend(devices)
    logging.getLogger("absl").setLevel(logging.ERROR)
    found()
