"""Load a checked Recipe from a path, and write one back as YAML."""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dtrain.core.errors import RecipeError
from dtrain.core.shipped import find
from dtrain.core.types import JsonObject
from dtrain.recipe.compose import compose, merge, name_of
from dtrain.recipe.crosscheck import Problem, Sections, problems_of
from dtrain.recipe.parse import fields
from dtrain.recipe.parse import value as parsed
from dtrain.recipe.paths import absolute, unknown_homes, unusable, with_absolute_paths
from dtrain.recipe.problems import Problems
from dtrain.recipe.recipe import Recipe
from dtrain.recipe.yaml import Mark, Node, dump, parse, walk

NAMES = re.compile(
    r"(api|access|private|secret)[_-]?key$ | (^|[_-])(tokens?|secrets?|password|passwd|credentials?)$",
    re.IGNORECASE | re.VERBOSE,
)
LEAST = 8
"""Shortest value that counts as a secret because of its key's name alone; an `end_token` is shorter."""
SHAPES = re.compile(
    r"""hf_[A-Za-z0-9]{30,} | gh[pousr]_[A-Za-z0-9]{30,} | github_pat_\w{30,} | glpat-[\w-]{20,}
    | sk-[\w-]{20,} | wandb_v\d_\w{20,} | AKIA[A-Z0-9]{16} | AIza[\w-]{35} | ya29\.[\w-]{20,} | xox[abp]-[\w-]{10,}
    | hooks\.slack\.com/\w+/\w | discord(app)?\.com/api/webhooks/\d | webhook\.office\.com/\w
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY | ://[^/\s:@]+:[^/\s@]+@ | ://[^/\s:@]{16,}@""",
    re.VERBOSE,
)
"""Tokens with a known format, webhooks, private keys, and passwords in URLs."""
HINT = "set it in the environment, e.g. as WANDB_API_KEY or HF_TOKEN, and remove it here; it was not printed or stored"


def secrets(tree: Node) -> list[str]:
    """Dotted paths of the values that look like secrets."""
    return [path for path, node in walk(tree) if isinstance(node.value, str) and _secret(path, node.value)]


def _secret(path: str, text: str) -> bool:
    webhook = path.endswith("webhook") and "://" in text
    return webhook or bool((len(text) >= LEAST and _named(path)) or SHAPES.search(text))


def _named(path: str) -> bool:
    return bool(NAMES.search(path.rpartition(".")[2]))


IRRELEVANT = {
    "name",
    "steps",
    "epochs",
    "engine",
    "mesh",
    "accumulate",
    "evaluate",
    "stop",
    "checkpoint",
    "track",
    "guard",
    "profile",
    "launch",
}
"""Sections that may change when a run resumes: they affect neither the data nor the mathematics of a step."""

LOADING = {
    "data.load",
    "data.root",
    "data.files",
    "data.test_files",
    "data.file",
    "data.test_file",
    "data.tokenizer",
    "data.download",
    "data.mirrors",
    "data.cache",
    "data.limits",
    "model.folder",
    "data.folder",
    "optimizer.folder",
}
"""Keys that set where examples and code are and how they are read; the examples are compared by fingerprint."""

OF_SOURCE = re.compile(r"^data\.(sources\.\d+\.data|columns\.[^.]+(?=\.tokenizer$))\.")
"""Before the keys of a mixture's source, and the tokenizer of a column, which are as those of `data`."""

COMPUTING = {"model.remat", "model.unroll", "model.loss_chunks"}
"""Keys of `model` that set how a step is computed, not its result."""


WITHOUT_LENGTH = {"constant", "plateau"}
"""Kinds of schedules whose learning rate does not depend on the length of the run."""


@dataclass(frozen=True)
class Draft:
    """A recipe as far as it could be parsed."""

    tree: Node
    values: JsonObject
    """The sections, with defaults filled in; FAILED for those that could not be parsed."""
    problems: Problems
    beside: dict[str, str]
    """Paths that were resolved relative to the recipe, by key."""

    @property
    def parts(self) -> Recipe:
        """The sections as attributes, like a Recipe; access to a section that was refused raises `Unread`."""
        return cast(Recipe, Sections(self.values))

    def add(self, problem: Problem) -> None:
        """Add a problem at its dotted path."""
        where, message, hint = problem
        self.problems.add(mark_of(self.tree, where), where, message, hint)

    def recipe(self) -> Recipe:
        """The recipe. Raises RecipeError with every problem, each at its file:line:column."""
        if self.problems.count:
            raise RecipeError(self.problems.lines, topic=self.problems.key)
        return Recipe(**self.values)


def load(path: Path | str, overrides: Sequence[str] = (), devices: int | None = None) -> Recipe:
    """Load a recipe: a file, or the name of one that comes with dtrain ("mlp-digits"), with overrides ("steps=3").

    `devices`, if known, is checked against the mesh. Raises RecipeError with every problem, each at its
    file:line:column.
    """
    if not isinstance(path, str | Path):
        hint = "write it to a file: Path('recipe.yaml').write_text(json.dumps(recipe)) is YAML, too"
        raise RecipeError(f"a recipe is a file or a name, not {type(path).__name__}", hint)
    path = find(path) if isinstance(path, str) else path
    recipe_draft = draft(path, overrides)
    for problem in problems_of(recipe_draft.parts, devices):
        recipe_draft.add(problem)
    return recipe_draft.recipe()


def draft(path: Path, overrides: Sequence[str] = ()) -> Draft:
    """The recipe as far as it can be parsed, with the problems of single keys.

    Raises RecipeError if it is not YAML, contains a secret, or contains a string or a path that cannot be used.
    """
    tree = compose(path, overrides)
    named = Node({"name": Node(name_of(path), Mark(str(path)))}, tree.mark)
    tree, problems = merge(named, tree), Problems()
    for where in secrets(tree):
        mark = mark_of(tree, where)  # the mark of an override quotes its value
        problems.add(mark if mark.line else Mark("an argument"), where, "contains a secret", HINT)
    if problems.count:
        raise RecipeError(problems.lines, topic=problems.key)  # and no others: their messages quote values
    for where, node in walk(tree):
        wrong = unusable(node.value) if isinstance(node.value, str) else ""
        wrong = wrong or next((wrong for key in node.keys if (wrong := unusable(key))), "")
        if wrong:
            problems.add(node.mark, where, wrong)
    for where, wrong in unknown_homes(tree):
        problems.add(mark_of(tree, where), where, wrong)
    if problems.count:
        raise RecipeError(problems.lines, topic=problems.key)
    tree, beside = with_absolute_paths(tree)
    values = fields(Recipe, tree, "", problems, Recipe)
    rest = {f.name: f for f in dataclasses.fields(Recipe) if f.name not in values}
    values |= {
        name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for name, f in rest.items()
    }
    return Draft(tree, values, problems, beside)


def refuse_conflicts(recipe: Recipe) -> None:
    """Raise RecipeError with every conflict between the sections of a recipe: one that `load` did not make, or that was
    changed since."""
    found = problems_of(recipe, None)
    if found:
        raise RecipeError([f"{where}: {message}" for where, message, _ in found], found[0][2])


def part(union: object, values: JsonObject, path: str) -> Any:
    """Parse one section from the values that `plain_part` gives. Raises RecipeError if they are not valid."""
    problems = Problems()
    section = parsed(union, parse(dump(values), path), path, problems, Recipe)
    if problems.count:
        raise RecipeError(problems.lines, topic=problems.key)
    return section


def plain_part(section: Any) -> dict[str, object]:
    """A section as plain values, the inverse of `part`."""
    return _without_none(dataclasses.asdict(section))


def given_part(section: Any) -> dict[str, Any]:
    """A section as plain values, without what is the default in it and in its own sections."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if field.name == "kind" or (value is not None and value != field.default):
            found[field.name] = _given(value)
    return found


def _given(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_given(one) for one in value]
    return given_part(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def plain(recipe: Recipe) -> JsonObject:
    """The recipe as plain values with every default; fields that are None are left out."""
    values = _without_none(dataclasses.asdict(recipe))
    values["model"].pop("preset", None)  # its fields are written out; a preset would fill in those that are None
    return values


def text(recipe: Recipe) -> str:
    """The recipe as YAML that loads as the same recipe."""
    return dump(plain(recipe))


def lasting_text(recipe: Recipe) -> str:
    """The recipe as YAML that loads as the same recipe from any folder."""
    return dump(absolute(plain(recipe)))


def recipe_digest(text: str) -> str:
    """By which run.json knows the recipe.yaml that dtrain wrote."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(old: JsonObject, new: JsonObject) -> list[str]:
    """Changes between two plain recipes that affect the numbers of a run."""
    before, after = (flattened(part, IRRELEVANT | LOADING | COMPUTING) for part in (old, new))
    if not WITHOUT_LENGTH & {part.get("optimizer", {}).get("schedule", {}).get("kind") for part in (old, new)}:

        def length(part: JsonObject) -> JsonObject:
            return {key: part[key] for key in ("steps", "epochs") if key in part}

        before, after = before | length(old), after | length(new)
    return [
        f"{key}: was {before.get(key, 'not set')}, now {after.get(key, 'not set')}"
        for key in sorted(before.keys() | after.keys())
        if repr(before.get(key)) != repr(after.get(key))  # by repr, since NaN != NaN
    ]


def flattened(tree: Mapping[str, object], left_out: Set[str], path: str = "") -> dict[str, object]:
    """The values by dotted path without those keys; a key of a mixture's source is one of `data`."""
    result = {}
    for key, value in tree.items():
        here = f"{path}.{key}" if path else key
        if OF_SOURCE.sub("data.", here) in left_out or value in ((), []):  # an empty list is one that is not set
            continue
        if isinstance(value, tuple | list) and all(isinstance(item, dict) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        result |= flattened(value, left_out, here) if isinstance(value, dict) else {here: value}
    return result


def _without_none(value: object) -> Any:
    if isinstance(value, dict):
        return {
            key: child if key == "args" else _without_none(child) for key, child in value.items() if child is not None
        }
    return [_without_none(child) for child in value] if isinstance(value, tuple | list) else value


def mark_of(tree: Node, path: str) -> Mark:
    """The mark at a dotted path, or of the nearest section around it."""
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
