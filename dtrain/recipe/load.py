"""From a path to a checked Recipe, and back to YAML."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dtrain.core.errors import RecipeError
from dtrain.recipe.compose import compose, merge
from dtrain.recipe.crosscheck import Parts, Problem, problems_of
from dtrain.recipe.parse import fields
from dtrain.recipe.parse import value as parsed
from dtrain.recipe.paths import anchored, homeless, unusable
from dtrain.recipe.problems import Problems
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

LOADING = {
    "data.load",
    "data.root",
    "data.files",
    "data.test_files",
    "data.tokenizer",
    "data.download",
    "data.mirrors",
    "data.cache",
    "model.folder",
}
"""Keys that say where examples and code are and how they are read; a fingerprint of the examples is compared."""

COMPUTING = {"model.remat", "model.unroll", "model.loss_chunks"}
"""Keys of `model` that say how a step is computed, not what."""


@dataclass(frozen=True)
class Draft:
    """A recipe as far as it could be read."""

    tree: Node
    values: dict[str, Any]
    """The sections that could be read, with the defaults of what is not given."""
    problems: Problems
    beside: dict[str, str]
    """Paths that were found beside the recipe, by their key."""

    @property
    def parts(self) -> Recipe:
        """What was read, by attributes as in a Recipe; `Unread` where a section was refused."""
        return cast(Recipe, Parts(self.values))

    def add(self, problem: Problem) -> None:
        """A problem of sections that could be read."""
        where, message, hint = problem
        self.problems.add(mark_of(self.tree, where), where, message, hint)

    def recipe(self) -> Recipe:
        """The recipe; RecipeError with every problem, each at its file:line:column."""
        if self.problems.count:
            raise RecipeError(self.problems.lines)
        return Recipe(**self.values)


def load(path: Path, overrides: Sequence[str] = (), devices: int | None = None) -> Recipe:
    """The recipe; RecipeError with every problem, each at its file:line:column.

    `devices`, where known, is compared with the mesh.
    """
    found = draft(path, overrides)
    for problem in problems_of(found.parts, devices):
        found.add(problem)
    return found.recipe()


def draft(path: Path, overrides: Sequence[str] = ()) -> Draft:
    """The recipe as far as it can be read, with the problems of single keys; RecipeError where it is no YAML."""
    tree = compose(path, overrides)
    named = Node({"name": Node(_name_of(path), Mark(str(path)))}, tree.mark)
    tree, problems = merge(named, tree), Problems()
    for where in secrets(tree):
        mark = mark_of(tree, where)  # of an override it would quote the value
        problems.add(mark if mark.line else Mark("an argument"), where, "holds a secret", HINT)
    if problems.count:
        raise RecipeError(problems.lines)  # alone: other complaints show what they found
    for where, node in walk(tree):
        wrong = unusable(node.value) if isinstance(node.value, str) else ""
        wrong = wrong or next((wrong for key in node.keys if (wrong := unusable(key))), "")
        if wrong:
            problems.add(node.mark, where, wrong)
    for where, wrong in homeless(tree):
        problems.add(mark_of(tree, where), where, wrong)
    if problems.count:
        raise RecipeError(problems.lines)
    tree, beside = anchored(tree)
    values = fields(Recipe, tree, "", problems, Recipe)
    rest = {f.name: f for f in dataclasses.fields(Recipe) if f.name not in values}
    values |= {
        name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for name, f in rest.items()
    }
    return Draft(tree, values, problems, beside)


def part(union: Any, values: dict[str, Any], path: str) -> Any:
    """A section of its own, as `plain` gives it; RecipeError where it is none."""
    problems = Problems()
    found = parsed(union, parse(dump(values), path), path, problems, Recipe)
    if problems.count:
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


def mark_of(tree: Node, path: str) -> Mark:
    """The mark of the dotted path, or of the nearest section around it."""
    node = tree
    for part in path.split(".") if path else ():
        inside: Any = node.value
        if isinstance(inside, dict) and part in inside:
            node = inside[part]
        elif isinstance(inside, tuple) and part.isdecimal() and int(part) < len(inside):
            node = inside[int(part)]
        else:
            break
    return node.mark
