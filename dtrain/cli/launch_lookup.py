"""Find the launch that a command refers to: from a recipe, or from a launch record."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.core.errors import EnvironmentFault, RecipeError
from dtrain.launch.commands import run

if TYPE_CHECKING:
    from dtrain.launch.job import LaunchJob, LaunchTarget
    from dtrain.recipe.recipe import Recipe

OUTPUT = "launch"


def launch_section(folder: Path) -> dict[str, object]:
    """The output `launch` of an applied configuration: the recipe's launch section.

    RecipeError if the folder has no such configuration or output, EnvironmentFault if terraform fails."""
    if not list(folder.glob("*.tf")):
        raise RecipeError(f"{folder} contains no Terraform configuration", "an example is terraform/examples/tpu")
    command = ["terraform", f"-chdir={folder}", "output", "-no-color", "-json"]
    try:
        outputs = json.loads(run(command))
    except ValueError as error:
        raise EnvironmentFault(f"{' '.join(command)} printed no JSON") from error
    if not outputs:
        hint = f"terraform -chdir={folder} init && terraform -chdir={folder} apply; dtrain does not apply it"
        raise EnvironmentFault(f"{folder} has no outputs: it is not applied yet", hint)
    value = outputs.get(OUTPUT, {}).get("value")
    if not isinstance(value, dict):
        message = f"{folder} has no output {OUTPUT!r} that is a map"
        raise RecipeError(message, "its value must be the recipe's launch section")
    return value


SUFFIXES = (".yaml", ".yml")


def requested(recipe: str, overrides: list[str], terraform: Path | None = None) -> "tuple[LaunchTarget, LaunchJob]":
    """The target of the recipe's launch section, and the run without that section; see `_loaded`."""
    return _job(_loaded(recipe, overrides, terraform))


def _loaded(recipe: str, overrides: list[str], terraform: Path | None) -> "Recipe":
    """The recipe, which has a launch section.

    With the folder of an applied Terraform configuration, its output `launch` is the launch section, changed by
    `overrides`; its hours are a limit that they cannot exceed."""
    import dataclasses
    import json

    from dtrain.core.errors import RecipeError
    from dtrain.core.shipped import find
    from dtrain.recipe.load import load

    section = launch_section(terraform) if terraform else {}
    hours = section.pop("hours", None)
    keys = sorted(section, key=lambda key: key != "kind")  # kind first: it determines the other keys
    loaded = load(find(recipe), [*(f"launch.{key}={json.dumps(section[key])}" for key in keys), *overrides])
    if loaded.launch is None:
        message = f"{recipe} has no launch section, which sets where to run"
        raise RecipeError(message, "add one, as launch='{kind: ssh, hosts: [a, b]}', or launch=local")
    if isinstance(hours, int | float):
        loaded = dataclasses.replace(
            loaded, launch=dataclasses.replace(loaded.launch, hours=min(hours, loaded.launch.hours or hours))
        )
    return loaded


def _job(loaded: "Recipe") -> "tuple[LaunchTarget, LaunchJob]":
    import dataclasses

    from dtrain.core import extras
    from dtrain.launch.job import LaunchJob
    from dtrain.recipe.load import plain_part, text
    from dtrain.recipe.packages import packages

    assert loaded.launch is not None
    return loaded.launch, LaunchJob(
        loaded.name,
        text(dataclasses.replace(loaded, launch=None)),
        target=plain_part(loaded.launch),
        extras=extras.of(module for _, module in packages(loaded)),
    )


def launchable(recipe: str, overrides: list[str], terraform: Path | None = None) -> "tuple[LaunchTarget, LaunchJob]":
    """The same as `requested`, with what the recipe needs on the hosts. RecipeError if they surely do not have it."""
    import dataclasses

    from dtrain.core.shipped import find
    from dtrain.recipe.inventory import Here, inventory, inventory_lines, problems_there
    from dtrain.recipe.load import draft

    loaded = _loaded(recipe, overrides, terraform)
    target, job = _job(loaded)
    path = find(recipe)
    here = Here([Path.cwd(), path.parent.resolve()], draft(path, overrides).beside.values())
    needs = inventory(loaded)
    problems = [f"  {key}: {message}; {hint}" for key, message, hint in problems_there(needs, target, here)]
    if problems:
        raise RecipeError("\n".join(["the run would fail on the hosts:", *problems]))
    return target, dataclasses.replace(job, needs=tuple(inventory_lines(needs, target, here)))


def known(
    runs: Path, name: str, overrides: list[str] | None = None, terraform: Path | None = None
) -> "tuple[LaunchTarget, LaunchJob]":
    """The launch recorded under that name in `runs`; given a recipe file, the run of its name on its target.

    `overrides` and `terraform` are those of `up`, for a recipe file. RecipeError if there is no such run."""
    import dataclasses

    from dtrain.core.errors import RecipeError
    from dtrain.launch import registry

    if not name.endswith(SUFFIXES):
        if overrides or terraform:
            message = f"{name} is the name of a run: its launch record says where it runs"
            raise RecipeError(message, "give the recipe file in place of the name, or leave the overrides out")
        recorded = registry.record(runs, name)
        return target_of(recorded), recorded
    target, job = requested(name, overrides or [], terraform)
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
