"""From a path to a checked Recipe, and back to YAML."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.errors import RecipeError
from dtrain.recipe.compose import compose, merge
from dtrain.recipe.crosscheck import problems_of
from dtrain.recipe.parse import Problems, section
from dtrain.recipe.parse import value as parsed
from dtrain.recipe.recipe import Recipe
from dtrain.recipe.secrets import HINT, secrets
from dtrain.recipe.yaml import Mark, Node, dump, parse, walk

IRRELEVANT = {
    "name",
    "steps",
    "epochs",
    "engine",
    "mesh",
    "accumulate",
    "evaluate",
    "checkpoint",
    "track",
    "guard",
    "launch",
}
"""Sections that may change under a run: they change neither the data nor the mathematics of a step."""

LOADING = {"data.load", "data.root", "data.download", "data.mirrors", "data.cache"}
"""Keys of `data` that say where examples lie and how they are read; a fingerprint watches the examples."""

COMPUTING = {"model.remat", "model.unroll", "model.loss_chunks"}
"""Keys of `model` that say how a step is computed, not what."""


def load(path: Path, overrides: Sequence[str] = (), devices: int | None = None) -> Recipe:
    """The recipe; RecipeError with every problem, each at its file:line:column.

    `devices`, where known, is held against the mesh.
    """
    tree = compose(path, overrides)
    named = Node({"name": Node(_name_of(path), Mark(str(path)))}, tree.mark)
    tree, problems = merge(named, tree), Problems()
    marks = {where: node.mark for where, node in walk(tree)}
    for where in secrets(tree):
        problems.add(marks[where], where, "holds a secret", HINT)
    if problems.lines:
        raise RecipeError(problems.lines)  # alone: other complaints show what they found
    recipe: Recipe | None = section(Recipe, tree, "", problems)
    if recipe is not None:
        for where, message, hint in problems_of(recipe, devices):
            problems.add(_nearest(marks, where), where, message, hint)
    if recipe is None or problems.lines:
        raise RecipeError(problems.lines)
    return recipe


def part(union: Any, values: dict[str, Any], path: str) -> Any:
    """A section of its own, as `plain` gives it; RecipeError where it is none."""
    problems = Problems()
    found = parsed(union, parse(dump(values), path), path, problems, Recipe)
    if problems.lines:
        raise RecipeError(problems.lines)
    return found


def plain_part(section: Any) -> dict[str, Any]:
    """A section as `part` takes it."""
    return _without_none(dataclasses.asdict(section))


def plain(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, every default written out; what is not set is left out."""
    found = _without_none(dataclasses.asdict(recipe))
    found["model"].pop("preset", None)  # its fields are written out, and what is not set must stay so
    return found


def text(recipe: Recipe) -> str:
    """The recipe as YAML that loads as the same recipe."""
    return dump(plain(recipe))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What changed between two plain recipes of all that bears on the numbers of a run."""
    before, after = _flat(old), _flat(new)
    if "constant" not in {part.get("optimizer", {}).get("schedule", {}).get("kind") for part in (old, new)}:
        length = lambda part: {key: part[key] for key in ("steps", "epochs") if key in part}  # noqa: E731
        before, after = before | length(old), after | length(new)
    return [
        f"{key}: was {before.get(key, 'not set')}, now {after.get(key, 'not set')}"
        for key in sorted(before.keys() | after.keys())
        if repr(before.get(key)) != repr(after.get(key))  # a NaN is no other than itself
    ]


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    found = {}
    for key, value in tree.items():
        here = f"{path}.{key}" if path else key
        if here in IRRELEVANT | LOADING | COMPUTING:
            continue
        found |= _flat(value, here) if isinstance(value, dict) else {here: value}
    return found


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: child if key == "args" else _without_none(child) for key, child in value.items() if child is not None
        }
    return [_without_none(child) for child in value] if isinstance(value, tuple | list) else value


def _name_of(path: Path) -> str:
    return re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:63]


def _nearest(marks: dict[str, Mark], path: str) -> Mark:
    """The mark of the path, or of the nearest section around it."""
    while path not in marks:
        path = path.rpartition(".")[0]
    return marks[path]
