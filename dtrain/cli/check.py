"""dtrain check"""

import typer

from dtrain.cli.arguments import Debug, Devices, Json, Overrides, Recipe
from dtrain.cli.exits import exits


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain check recipe.yaml mesh.fsdp=8 --devices 8")(check)


def check(
    recipe: Recipe, overrides: Overrides = None, devices: Devices = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Find every mistake in a recipe, in about a second, without touching a device."""
    with exits(debug):
        from dtrain.cli.recipes import find
        from dtrain.recipe.load import load, plain, text

        loaded = load(find(recipe), overrides or [], devices)
        if as_json:
            import json

            typer.echo(json.dumps(plain(loaded), indent=2))
        else:
            typer.echo(text(loaded), nl=False)
            typer.secho(f"{loaded.name}: no mistake found", fg="green", err=True)
