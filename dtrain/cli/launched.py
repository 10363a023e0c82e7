"""Which launch is meant: the one that a recipe asks for, or one that was noted here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtrain.launch.board import Entry
    from dtrain.launch.job import Job, Target
    from dtrain.launch.terraform import Ground


def asked(recipe: str, overrides: list[str]) -> "tuple[Target, Job]":
    """The target that the recipe names, and the run without it."""
    import dataclasses

    from dtrain.cli.recipes import find
    from dtrain.errors import RecipeError
    from dtrain.launch.job import Job
    from dtrain.recipe.load import load, plain_part, text

    loaded = load(find(recipe), overrides)
    if loaded.launch is None:
        message = f"{recipe} does not say where to run: it has no launch section"
        raise RecipeError(message, "add one, as launch='{kind: ssh, hosts: [a, b]}', or launch=local")
    recipe = text(dataclasses.replace(loaded, launch=None))
    return loaded.launch, Job(loaded.name, recipe, section=plain_part(loaded.launch))


def known(runs: Path, name: str) -> "tuple[Target, Job]":
    """What was launched under that name."""
    from dtrain.launch import board
    from dtrain.launch.job import Job
    from dtrain.recipe.load import part
    from dtrain.recipe.recipe import Launch

    found = board.entry(runs, name)
    return part(Launch, found.target, "launch"), Job(found.name, found.recipe, found.handle, found.target)


def refuse_while_alive(before: "Entry") -> None:
    """Locked where the run still lives in another place, which would be forgotten."""
    from dtrain.errors import Locked
    from dtrain.launch.job import Job
    from dtrain.recipe.load import part
    from dtrain.recipe.recipe import Launch

    there = part(Launch, before.target, "launch")
    rows = there.status(Job(before.name, before.recipe, before.handle))
    alive = [
        f"{row.name}: {row.state} {row.what}".rstrip() for row in rows if row.code is None and row.state != "absent"
    ]
    if alive:
        head = f"{before.name} was launched in another place, and lives there:"
        raise Locked("\n  ".join([head, *alive]), f"dtrain launch stop {before.name}, or give this one another name")


def rented(on: str | None, spot: bool) -> list[str]:
    """What the command line says of the machines, as overrides."""
    return ([f"launch.on={on}"] if on else []) + (["launch.spot=true"] if spot else [])


def applied(ground: "Ground", yes: bool) -> list[str]:
    """Terraform's output `launch`, as overrides, after it was shown, agreed to and applied."""
    import json

    from dtrain.cli.launch_output import be_sure, say

    def agreed(plan: str) -> None:
        say(plan.strip())
        be_sure("Apply it?", yes)

    found = ground.make(agreed, say)
    keys = sorted(found, key=lambda key: key != "kind")  # the kind says which other keys there are
    return [f"launch.{key}={json.dumps(found[key])}" for key in keys]


@contextmanager
def kept(ground: "Ground | None") -> Iterator[None]:
    """Say that what Terraform made stays, where what comes after it fails."""
    from dtrain.cli.launch_output import say

    try:
        yield
    except BaseException:
        if ground:
            say(f"what Terraform made stays; to take it away: terraform -chdir={ground.folder} destroy")
        raise
