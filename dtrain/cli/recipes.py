"""dtrain recipes"""

import json
from pathlib import Path
from typing import Annotated

import typer

from dtrain.cli import completion
from dtrain.cli.arguments import Json
from dtrain.cli.exits import exits
from dtrain.cli.synonyms import Group
from dtrain.core.shipped import by_name, shipped

app = typer.Typer(
    cls=Group,
    help="List, show and copy the recipes that come with dtrain, and print their schema.",
    epilog="Example: dtrain recipes cp mlp-mnist my.yaml",
    no_args_is_help=True,
)

Name = Annotated[
    str,
    typer.Argument(
        help="Name of a recipe, as listed by `dtrain recipes ls`.", autocompletion=completion.shipped_recipes
    ),
]


@app.command(epilog="Example: dtrain recipes ls")
def ls(as_json: Json = False) -> None:
    """List the recipes with the first line of each."""
    width = max(map(len, shipped()), default=0)
    found = {}
    for name, path in shipped().items():
        found[name] = next((line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("# ")), "")
    if as_json:
        typer.echo(json.dumps([{"name": name, "about": first} for name, first in found.items()], indent=2))
        return
    for name, first in found.items():
        typer.echo(f"{name:<{width}}  {first}")


@app.command(epilog="Example: dtrain recipes show mlp-digits")
def show(name: Name) -> None:
    """Print a recipe."""
    with exits():
        typer.echo(by_name(name).read_text(), nl=False)


@app.command(epilog="Example: dtrain recipes cp mlp-mnist my.yaml")
def cp(name: Name, to: Annotated[Path, typer.Argument(help="File or folder for the copy.")]) -> None:
    """Copy a recipe, to edit it. Never overwrites a file."""
    with exits():
        from dtrain.core.files import create

        target = to / f"{name}.yaml" if to.is_dir() else to
        create(target, by_name(name).read_text())
        typer.echo(target)


@app.command(epilog="Example: dtrain recipes presets")
def presets(as_json: Json = False) -> None:
    """List the published shapes that a decoder's `preset` can name, with their sizes."""
    with exits():
        from dtrain.models.decoder import Decoder
        from dtrain.models.nn.param import count
        from dtrain.recipe.compose import presets as known
        from dtrain.recipe.parse import section
        from dtrain.recipe.problems import Problems

        rows = []
        for name, node in known().items():
            model = section(Decoder, node, "model", Problems())
            experts = f", {model.experts.active} of {model.experts.count} experts" if model.experts else ""
            shape = f"{model.layers} layers of width {model.width}{experts}, context {model.context:,}"
            size = count(model.params())
            rows.append({"name": name, "parameters": size, "layers": model.layers, "width": model.width,
                         "context": model.context})  # fmt: skip
            if not as_json:
                typer.echo(f"{name:<14} {size:>16,} parameters  {shape}")
        if as_json:
            typer.echo(json.dumps(rows, indent=2))


@app.command(epilog="Example: dtrain recipes schema > recipe.schema.json")
def schema() -> None:
    """Print the JSON Schema of recipes, for completion in an editor."""
    with exits():
        from dtrain.recipe.schema import schema as make

        typer.echo(json.dumps(make(), indent=2))
