"""Which launch is meant: the one that a recipe asks for, or one that was made before."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtrain.launch.job import LaunchJob, LaunchTarget

SUFFIXES = (".yaml", ".yml")


def requested(recipe: str, overrides: list[str]) -> "tuple[LaunchTarget, LaunchJob]":
    """The target that the recipe names, and the run without it."""
    import dataclasses

    from dtrain.cli.recipes import find
    from dtrain.core.errors import RecipeError
    from dtrain.launch.job import LaunchJob
    from dtrain.recipe.load import load, plain_part, text

    loaded = load(find(recipe), overrides)
    if loaded.launch is None:
        message = f"{recipe} does not say where to run: it has no launch section"
        raise RecipeError(message, "add one, as launch='{kind: ssh, hosts: [a, b]}', or launch=local")
    return loaded.launch, LaunchJob(
        loaded.name, text(dataclasses.replace(loaded, launch=None)), target=plain_part(loaded.launch)
    )


def known(runs: Path, name: str) -> "tuple[LaunchTarget, LaunchJob]":
    """The launch of that name recorded here; given a recipe file, the run that its target has under its name.

    RecipeError where there is none."""
    import dataclasses

    from dtrain.core.errors import RecipeError
    from dtrain.launch import registry

    if not name.endswith(SUFFIXES):
        found = registry.record(runs, name)
        return target_of(found), found
    target, job = requested(name, [])
    found = registry.find(runs, job.name)
    if found and found.target == job.target:
        return target, found
    handle = target.find(job)
    if handle is None:
        raise RecipeError(f"no run {job.name!r} was found where {name} launches it", f"dtrain launch up {name}")
    return target, dataclasses.replace(job, handle=handle)


def target_of(record: "LaunchJob") -> "LaunchTarget":
    """The target that a record was launched on. RecipeError where this version does not have its kind."""
    from dtrain.core.errors import RecipeError
    from dtrain.recipe.load import part
    from dtrain.recipe.recipe import Launch

    try:
        return part(Launch, record.target, "launch")
    except RecipeError as error:
        kind = record.target.get("kind")
        raise RecipeError(
            f"{record.name} was launched by another version of dtrain, as kind {kind!r}: {error.message}",
            "take it down with that version, or in the cloud's console; then remove its launch.json",
        ) from error


def refuse_while_alive(before: "LaunchJob") -> None:
    """Locked where the run is alive on another target, whose record would be overwritten."""
    from dtrain.core.errors import Locked

    rows = target_of(before).status(before)
    alive = [
        f"{row.name}: {row.state} {row.what}".rstrip()
        for row in rows
        if row.state == "unreachable" or (row.code is None and row.state != "absent")
    ]
    if alive:
        head = f"{before.name} was launched with another launch section, and may be alive there:"
        hint = f"dtrain launch stop {before.name}, or give this one another name: name=..."
        raise Locked("\n  ".join([head, *alive]), hint)


def rented(on: str | None, spot: bool) -> list[str]:
    """What the command line says of the machines, as overrides."""
    return ([f"launch.on={on}"] if on else []) + (["launch.spot=true"] if spot else [])


def from_terraform(folder: Path | None) -> list[str]:
    """The output `launch` of an applied Terraform configuration, as overrides."""
    import json

    from dtrain.launch.terraform import launch_section

    found = launch_section(folder) if folder else {}
    keys = sorted(found, key=lambda key: key != "kind")  # the kind decides which other keys there are
    return [f"launch.{key}={json.dumps(found[key])}" for key in keys]
