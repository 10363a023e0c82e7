"""Find the launch that a command refers to: from a recipe, or from a launch record."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtrain.launch.job import LaunchJob, LaunchTarget

SUFFIXES = (".yaml", ".yml")


def requested(recipe: str, overrides: list[str]) -> "tuple[LaunchTarget, LaunchJob]":
    """The target of the recipe's launch section, and the run without that section."""
    import dataclasses

    from dtrain.core.errors import RecipeError
    from dtrain.core.shipped import find
    from dtrain.launch.job import LaunchJob
    from dtrain.recipe.load import load, plain_part, text

    loaded = load(find(recipe), overrides)
    if loaded.launch is None:
        message = f"{recipe} has no launch section, which sets where to run"
        raise RecipeError(message, "add one, as launch='{kind: ssh, hosts: [a, b]}', or launch=local")
    return loaded.launch, LaunchJob(
        loaded.name, text(dataclasses.replace(loaded, launch=None)), target=plain_part(loaded.launch)
    )


def known(runs: Path, name: str) -> "tuple[LaunchTarget, LaunchJob]":
    """The launch recorded under that name in `runs`; given a recipe file, the run of its name on its target.

    RecipeError if there is none."""
    import dataclasses

    from dtrain.core.errors import RecipeError
    from dtrain.launch import registry

    if not name.endswith(SUFFIXES):
        recorded = registry.record(runs, name)
        return target_of(recorded), recorded
    target, job = requested(name, [])
    recorded = registry.find(runs, job.name)
    if recorded and recorded.target == job.target:
        return target, recorded
    handle = target.find(job)
    if handle is None:
        raise RecipeError(f"no run {job.name!r} was found on the launch target of {name}", f"dtrain launch up {name}")
    return target, dataclasses.replace(job, handle=handle)


def target_of(record: "LaunchJob") -> "LaunchTarget":
    """The target that a record was launched on. RecipeError if this version does not have its kind."""
    from dtrain.core.errors import RecipeError
    from dtrain.recipe.load import part
    from dtrain.recipe.recipe import Launch

    try:
        return part(Launch, record.target, "launch")
    except RecipeError as error:
        kind = record.target.get("kind")
        raise RecipeError(
            f"{record.name} was launched by another version of dtrain, as kind {kind!r}: {error.message}",
            "remove it with that version or in the cloud's console; then delete its launch.json",
        ) from error


def refuse_while_alive(before: "LaunchJob") -> None:
    """Locked if the run is alive on another target, whose record would be overwritten."""
    from dtrain.core.errors import Locked

    rows = target_of(before).status(before)
    alive = [
        f"{row.name}: {row.state} {row.what}".rstrip()
        for row in rows
        if row.state == "unreachable" or (row.code is None and row.state != "absent")
    ]
    if alive:
        head = f"{before.name} was launched with another launch section, and may be alive there:"
        hint = f"dtrain launch stop {before.name}, or give this run another name: name=..."
        raise Locked("\n  ".join([head, *alive]), hint)


def rented(on: str | None, spot: bool) -> list[str]:
    """The options --on and --spot, as overrides of the recipe."""
    return ([f"launch.on={on}"] if on else []) + (["launch.spot=true"] if spot else [])


def from_terraform(folder: Path | None) -> list[str]:
    """The output `launch` of an applied Terraform configuration, as overrides of the recipe."""
    import json

    from dtrain.launch.terraform import launch_section

    section = launch_section(folder) if folder else {}
    keys = sorted(section, key=lambda key: key != "kind")  # kind first: it determines the other keys
    return [f"launch.{key}={json.dumps(section[key])}" for key in keys]
