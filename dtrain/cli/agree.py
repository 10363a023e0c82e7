"""dtrain agree"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli.arguments import Debug, Devices, Json, Overrides, Recipe, use_devices
from dtrain.cli.exits import exits, interruptible
from dtrain.core.errors import DtrainError, RecipeError

if TYPE_CHECKING:
    from dtrain.parallel.mesh import Mesh
    from dtrain.recipe.recipe import Recipe as Loaded

STEPS = 3
SIMULATED = 8
"""Devices that are simulated on a machine without accelerators."""


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain agree mlp-digits --mesh '{fsdp: 2, tensor: 2}'")(agree)


def agree(
    recipe: Recipe,
    overrides: Overrides = None,
    meshes: Annotated[
        list[str] | None,
        typer.Option("--mesh", metavar="MESH", help="A mesh to compare, such as '{data: 2, fsdp: 4}'; repeatable."),
    ] = None,
    engines: Annotated[
        list[str] | None, typer.Option("--engine", metavar="ENGINE", help="An engine to compare; default: all.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--change",
            metavar="KEY=VALUE",
            help="A setting of what is compared, but not of the one device; repeatable.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Steps of training; default: 3, or those of --against.")
    ] = None,
    devices: Devices = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write what one device gives, for --against elsewhere.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare with such a file, of another machine or version, in its place."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the certificate as JSON.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare a recipe on meshes and engines with one device: each loss, gradient and parameter; print a certificate.

    Without --mesh, the mesh of the recipe is tried, and six of eight devices in which each axis occurs. Nothing is
    saved.
    """
    with exits(debug), interruptible():
        import json

        from dtrain.core.shipped import find
        from dtrain.recipe.examine import devices_here
        from dtrain.recipe.load import load

        use_devices(devices or (SIMULATED if devices_here() == 1 else None))
        from dtrain.runtime.agree import agreement, meshes_of, refuse_nothing, refuse_processes, tolerance
        from dtrain.runtime.trajectory import read_reference, reference_of

        def say(text: str) -> None:
            typer.echo(f"{text} ...", err=True)

        refuse_processes()
        if against and (steps or save):
            message = f"--against has its own steps and arrays, and excludes {'--steps' if steps else '--save'}"
            raise RecipeError(message, "leave one of them out")
        given, path = overrides or [], find(recipe)
        own, changed = load(path, given), load(path, [*given, *(changes or [])])
        compared = _engines(changed, engines or []), [_mesh(text) for text in meshes or []] or meshes_of(changed)
        reference = read_reference(against) if against else reference_of(own, steps or STEPS, say)
        if save:
            reference.save(save)
        allowed = max(tolerance(own), tolerance(changed))
        certificate = agreement(reference, changed, *compared, tolerance=allowed, changes=changes or [], say=say)
        if out:
            out.write_text(json.dumps(certificate.values(), indent=2) + "\n")
        typer.echo(json.dumps(certificate.values(), indent=2) if as_json else "\n".join(certificate.lines()))
        refuse_nothing(certificate)
        if not certificate.agrees:
            raise typer.Exit(DtrainError.exit_code)


def _mesh(text: str) -> "Mesh":
    from dtrain.parallel.mesh import Mesh
    from dtrain.recipe.load import part
    from dtrain.recipe.yaml import parse

    sizes = parse(text, "--mesh").plain()
    return part(Mesh, {"data": 1} | sizes if isinstance(sizes, dict) else sizes, "--mesh")


def _engines(changed: "Loaded", names: list[str]) -> dict[str, Any]:
    """The engines by name; that of the recipe with its own settings."""
    import typing

    from dtrain.recipe.load import part
    from dtrain.recipe.recipe import Engine

    own = changed.engine.choices
    kinds = [member().kind for member in typing.get_args(Engine)]
    found = {name: part(Engine, {"kind": name}, "--engine") for name in names or kinds}
    return {name: own.get(name, engine) for name, engine in found.items()}
