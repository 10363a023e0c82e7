"""dtrain check"""

from typing import Annotated

import typer

from dtrain.cli.arguments import Debug, Devices, Json, Overrides, Recipe
from dtrain.cli.exits import exits


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain check recipe.yaml mesh.fsdp=8 --devices 8")(check)


def check(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Devices = None,
    data: Annotated[bool, typer.Option("--data/--no-data", help="Open the data that the recipe names.")] = True,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the whole recipe, with the defaults of every key.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the mistakes in a recipe and the data it names, in about a second, without touching a device.

    Runs no code that a recipe names, writes nothing, downloads nothing. The last line names what was not checked.
    --resolved and --json print the recipe as a run gets it.
    """
    with exits(debug):
        from dtrain.core.shipped import find
        from dtrain.recipe.examine import examine
        from dtrain.recipe.load import plain, text

        result = examine(find(recipe), overrides or [], devices, data)
        if as_json:
            import json

            typer.echo(json.dumps(plain(result.recipe), indent=2))
        elif resolved:
            typer.echo(text(result.recipe), nl=False)
        for line in result.notes:
            typer.echo(line, err=True)
        for line in result.warnings:
            typer.secho(f"warning: {line}", fg="yellow", err=True)
        typer.secho(result.verdict(), fg="green", err=True)
