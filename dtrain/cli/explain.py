"""dtrain explain"""

from typing import Annotated

import typer

from dtrain.cli import completion
from dtrain.cli.arguments import Debug, Devices, Json, Overrides, Recipe, RunCode, refuse_code
from dtrain.cli.exits import exits, interruptible
from dtrain.core.signals import leaving_at_once

ON = "For the devices of this slice, e.g. v5e-16; default: as many as the mesh needs, of a CPU."


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain explain decoder-tiny mesh='{data: 2, fsdp: 2, tensor: 2}' --devices 8")(explain)


def explain(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Devices = None,
    jaxpr: Annotated[bool, typer.Option("--jaxpr", help="Print the traced step (jaxpr) instead.")] = False,
    hlo: Annotated[bool, typer.Option("--hlo", help="Print the compiled step (HLO) instead.")] = False,
    on: Annotated[str, typer.Option("--on", autocompletion=completion.targets, help=ON)] = "",
    run_code: RunCode = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show every parameter: its shape, the rule that shards it, its copies and bytes. Touches no device."""
    with exits(debug), interruptible(), leaving_at_once():
        from dtrain.core.errors import RecipeError

        if on and devices:
            raise RecipeError(f"--on {on} and --devices {devices} exclude each other", "leave one of them out")
        if as_json and (jaxpr or hlo):
            raise RecipeError("--json goes with the table of parameters", "leave out --jaxpr and --hlo, or --json")
        if jaxpr or hlo:
            typer.echo(_program(recipe, overrides or [], devices, on, run_code, compiled=hlo), nl=False)
            return
        from dtrain.assembly.explain import explain as explained
        from dtrain.core.shipped import find
        from dtrain.core.slices import target
        from dtrain.recipe.load import load

        where = target(on) if on else None
        count = where.devices if where else devices
        loaded = load(find(recipe), overrides or [], count)
        refuse_code(loaded.user_code, run_code)
        explanation = explained(loaded, count or loaded.mesh.least, where)
        if as_json:
            import json

            typer.echo(json.dumps(explanation.values(), indent=2))
        else:
            typer.echo("\n".join(explanation.lines()))


def _program(recipe: str, overrides: list[str], devices: int | None, on: str, run_code: bool, *, compiled: bool) -> str:
    """The step as a jaxpr, or as the compiler's scheduled HLO."""
    from dtrain.cli.plan import settle
    from dtrain.core.shipped import find
    from dtrain.core.slices import target
    from dtrain.recipe.compose import compose, least_devices

    path = find(recipe)
    wanted = target(on or f"cpu-{devices or least_devices(compose(path, overrides))}")
    settle([wanted])
    from dtrain.plan.plan import program
    from dtrain.recipe.load import load

    loaded = load(path, overrides, wanted.devices)
    refuse_code(loaded.user_code, run_code)
    return program(loaded, wanted, compiled=compiled)
