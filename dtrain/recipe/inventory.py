"""What a recipe needs where it runs: files, code, other runs, secrets; found once, for `check` and for launches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dtrain.core.errors import Problem
from dtrain.core.types import JsonObject
from dtrain.data.paths import is_remote
from dtrain.launch.job import LaunchTarget
from dtrain.recipe.paths import FOLDERS, ORIGINS, PATHS, fixed_parts, has_module, is_elsewhere
from dtrain.recipe.recipe import Recipe

Kind = Literal["files", "run", "code", "secret"]
Place = Literal["here", "in the bucket", "missing", "not checked"]
KEYS = tuple(key for key in PATHS if key not in FOLDERS)
RUNS = tuple(key for key in ORIGINS if key.endswith(".run"))
CODE = ("model", "data", "optimizer")
"""Sections that may name code of a user's own."""


@dataclass(frozen=True)
class Need:
    """One thing that a recipe needs where it runs."""

    key: str
    """Its dotted path in the recipe."""
    kind: Kind
    value: str


def inventory(recipe: Recipe) -> list[Need]:
    """Everything that the recipe names outside of itself, in the order of its keys. Nothing is opened."""
    from dtrain.recipe.load import plain

    values = plain(recipe)
    return [*_paths(values), *_code(values), *_secrets(recipe)]


def _paths(values: JsonObject) -> Iterator[Need]:
    trees: list[tuple[str, Any]] = [("", values)]
    data = values.get("data") or {}
    trees += [(f"data.sources.{number}.", source) for number, source in enumerate(data.get("sources") or ())]
    for prefix, tree in trees:
        for key in (key for key in KEYS if not prefix or key.startswith("data.")):
            found: Any = tree
            for part in key.split("."):
                found = found.get(part) if isinstance(found, dict) else None
            for text in found if isinstance(found, list | tuple) else [found]:
                if isinstance(text, str) and _is_path(text):
                    yield Need(f"{prefix}{key}", "run" if key in RUNS else "files", text)


def _is_path(text: str) -> bool:
    return bool(text) and (is_remote(text) or text.startswith(("/", "~")) or not is_elsewhere(text))


def _code(values: JsonObject) -> Iterator[Need]:
    sections = [(name, values.get(name)) for name in CODE]
    sections += [(f"track.to.{number}", one) for number, one in enumerate((values.get("track") or {}).get("to") or ())]
    for key, section in sections:
        if isinstance(section, dict) and section.get("target"):
            yield Need(f"{key}.target", "code", str(section["target"]))


def _secrets(recipe: Recipe) -> Iterator[Need]:
    for number, tracker in enumerate(recipe.track.to):
        yield from (Need(f"track.to.{number}", "secret", name) for name in tracker.secrets)


def place_of(need: Need, target: LaunchTarget, folders: Sequence[Path]) -> Place:
    """Where the hosts of a launch find it. `folders`: the working folder and that of the recipe, on this machine."""
    if need.kind == "secret":
        sent = target.keeps_environment or need.value in target.environment
        return "here" if sent else "missing" if target.files == "own" else "not checked"
    if is_remote(need.value):
        return "in the bucket"
    if need.kind == "code":
        module = need.value.partition(":")[0].partition(".")[0]
        local, there = any(has_module(folder, module) for folder in folders), False
    else:
        path = Path(need.value).expanduser()
        local = not path.is_absolute() or any(path.is_relative_to(folder) for folder in folders)
        there = Path(*path.parts[: fixed_parts(path.parts)]).exists()
    if target.files == "shared":
        return "here" if there or need.kind == "code" else "missing"
    return "missing" if local and target.files == "own" else "not checked"


WAYS: dict[Kind, str] = {
    "files": "give an address (gs://, s3://), or an absolute path that the image or a mount of the hosts has",
    "run": "give the absolute path of that run folder on the hosts",
    "code": "install it in the image, as launch/Dockerfile does with dtrain, and run the launch from another folder",
    "secret": "add it: launch.environment: [{}]",
}
"""What to do about what is missing on the hosts."""


def problems_there(needs: Sequence[Need], target: LaunchTarget, folders: Sequence[Path]) -> Iterator[Problem]:
    """What the recipe needs and the hosts of a launch surely do not have."""
    for need in needs:
        if place_of(need, target, folders) == "missing":
            hint = WAYS[need.kind].format(need.value)
            if need.kind == "secret":
                yield need.key, f"the launched run would not have the variable {need.value}", hint
            elif target.files == "own":
                yield need.key, f"{need.value} is on this machine, and the hosts do not have this machine's files", hint
            else:
                yield need.key, f"{need.value} does not exist", "name an existing one"


def inventory_lines(needs: Sequence[Need], target: LaunchTarget, folders: Sequence[Path]) -> list[str]:
    """A line for each thing that is needed: its key, its value and where the hosts find it."""
    width = max((len(need.key) for need in needs), default=0)
    return [f"needs {need.key:<{width}}  {need.value}: {place_of(need, target, folders)}" for need in needs]
