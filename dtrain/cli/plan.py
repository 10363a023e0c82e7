"""dtrain plan"""

from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli.arguments import Debug, Json, Overrides, Recipe
from dtrain.cli.exits import exits

if TYPE_CHECKING:
    from dtrain.plan.target import Target

EXAMPLE = "Example: dtrain plan recipe.yaml --on v5p-128"
On = Annotated[str, typer.Option("--on", help="A slice or GPUs: v5e-16, v5p-128, v5p:4x4x12, h100-8, cpu-8.")]


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog=EXAMPLE)(plan)


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    on: On = "",
    slices: Annotated[int, typer.Option(min=1, help="Slices of that kind, joined by the slow network.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Arithmetic alone, in about a second.")] = False,
    price: Annotated[float | None, typer.Option(min=0, help="Dollars an hour for one chip.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether a run fits on hardware that is not there, how fast it goes and what it costs."""
    with exits(debug):
        from dtrain.cli.recipes import find
        from dtrain.errors import EnvironmentFault, RecipeError
        from dtrain.plan.target import target

        if not on:
            raise RecipeError("plan for what? --on names a slice or GPUs", "as in --on v5e-16, v5p-128, h100-8, cpu-8")
        wanted = target(on, slices)
        _settle(wanted)
        from dtrain.plan import plan as plans
        from dtrain.plan.report import lines, values
        from dtrain.recipe.load import load

        loaded = load(find(recipe), overrides or [], wanted.devices)
        made = plans.quick(loaded, wanted, price) if quick else plans.plan(loaded, wanted, None, price)
        if as_json:
            import json

            typer.echo(json.dumps(values(made), indent=2))
        else:
            typer.echo("\n".join(lines(made)))
        if not made.fits:
            raise typer.Exit(EnvironmentFault.exit_code)


def _settle(wanted: "Target") -> None:
    """What JAX must hear before it is imported."""
    import os

    from dtrain.parallel.devices import pretend

    if wanted.chip is None:
        pretend(wanted.devices)
    os.environ["JAX_PLATFORMS"] = "cpu"
