"""dtrain explain"""

import typer

from dtrain.cli.arguments import Debug, Devices, Json, Overrides, Recipe
from dtrain.cli.exits import exits


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain explain decoder-tiny mesh='{data: 2, fsdp: 2, tensor: 2}' --devices 8")(explain)


def explain(
    recipe: Recipe, overrides: Overrides = None, devices: Devices = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Show every parameter: its shape, the rule that splits it, its copies and bytes. Touches no device."""
    with exits(debug):
        from dtrain.cli.recipes import find
        from dtrain.explain import explain as made
        from dtrain.recipe.load import load

        loaded = load(find(recipe), overrides or [], devices)
        found = made(loaded, devices or loaded.mesh.least)
        if as_json:
            import json

            typer.echo(json.dumps(found.values(), indent=2))
        else:
            typer.echo("\n".join(found.lines()))
