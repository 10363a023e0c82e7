"""What a recipe needs where it runs: files, code, other runs, secrets; found once, for every launch."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Literal

from dtrain.core.errors import Problem
from dtrain.core.types import JsonObject
from dtrain.data.paths import is_remote
from dtrain.launch.job import LaunchTarget
from dtrain.recipe.load import plain
from dtrain.recipe.paths import (
    CODE_LISTS,
    CODE_SECTIONS,
    FOLDERS,
    ORIGINS,
    PATHS,
    fixed_parts,
    has_module,
    is_elsewhere,
    places,
)
from dtrain.recipe.recipe import Recipe

Place = Literal["here", "sent", "at an address, not checked", "missing", "not checked", "only if the image has it"]
KEYS = tuple(key for key in PATHS if key not in FOLDERS)
RUNS = tuple(key for key in ORIGINS if key.endswith(".run"))


@dataclass(frozen=True)
class Here:
    """What is known of this machine's part of a launch."""

    folders: Sequence[Path]
    """The working folder and that of the recipe, in which modules are found."""
    relative: Collection[str] = ()
    """Absolute paths that the recipe has as relative ones."""


@dataclass(frozen=True)
class Need(ABC):
    """One thing that a recipe needs where it runs."""

    key: str
    """Its dotted path in the recipe."""
    value: str

    @abstractmethod
    def place(self, target: LaunchTarget, here: Here) -> Place:
        """Where the hosts of a launch find it."""

    @abstractmethod
    def problem(self, target: LaunchTarget) -> Problem:
        """What is wrong, if it is missing."""


@dataclass(frozen=True)
class PathNeed(Need):
    """A file, a folder or a glob."""

    hint: str = "give an address (gs://, s3://), or an absolute path that the image or a mount of the hosts has"

    def place(self, target: LaunchTarget, here: Here) -> Place:
        if is_remote(self.value):
            return "at an address, not checked"
        path = Path(self.value).expanduser()
        if target.files == "shared":
            return "here" if Path(*path.parts[: fixed_parts(path.parts)]).exists() else "missing"
        if not path.is_absolute() or self.value in here.relative:
            return "missing" if target.files == "own" else "not checked"
        beside = target.mounted and not any(path.is_relative_to(folder) for folder in target.mounted)
        return "only if the image has it" if beside else "not checked"

    def problem(self, target: LaunchTarget) -> Problem:
        if target.files == "shared":
            return self.key, f"{self.value} does not exist", "name an existing one"
        message = f"{self.value} is relative to a folder of this machine, whose files the hosts do not have"
        return self.key, message, self.hint


@dataclass(frozen=True)
class CodeNeed(Need):
    """A module with code of a user's own: "package.module:name"."""

    def place(self, target: LaunchTarget, here: Here) -> Place:
        module = self.value.partition(":")[0].partition(".")[0]
        beside = any(has_module(folder, module) for folder in here.folders)
        if target.files == "shared":
            return "here" if beside else "not checked"
        return "missing" if beside and target.files == "own" and not _installed(module) else "not checked"

    def problem(self, target: LaunchTarget) -> Problem:
        del target
        message = f"the module of {self.value} is a file of this machine, which the hosts do not have"
        return self.key, message, "make it a package, and install it here and in the image (launch/Dockerfile)"


def _installed(module: str) -> bool:
    """Whether a package that is installed here has the module: then an image may have it as well."""
    with suppress(PackageNotFoundError):
        distribution(module)  # one that is installed in place does not list its modules
        return True
    return module in packages_distributions()


@dataclass(frozen=True)
class SecretNeed(Need):
    """An environment variable with a key of a service."""

    def place(self, target: LaunchTarget, here: Here) -> Place:
        del here
        if target.keeps_environment or self.value in target.environment:
            return "sent"
        return "missing" if target.files == "own" else "not checked"

    def problem(self, target: LaunchTarget) -> Problem:
        del target
        message = f"the launched run would not have the variable {self.value}"
        return self.key, message, f"add it: launch.environment: [{self.value}]"


def inventory(recipe: Recipe) -> list[Need]:
    """Everything that the recipe names outside of itself, in the order of its keys. Nothing is opened."""
    values = plain(recipe)
    return [*_paths(values), *_code(values), *_secrets(recipe)]


def _paths(values: JsonObject) -> Iterator[Need]:
    for key in KEYS:
        for name, around, last in places(values, key):
            found = around[last]
            for text in found if isinstance(found, list | tuple) else [found]:
                if isinstance(text, str) and _is_path(text):
                    own = "give the absolute path of that run folder on the hosts"
                    yield PathNeed(name, text, own) if key in RUNS else PathNeed(name, text)


def _is_path(text: str) -> bool:
    return bool(text) and (is_remote(text) or text.startswith(("/", "~")) or not is_elsewhere(text))


def _code(values: JsonObject) -> Iterator[Need]:
    sections = [(name, values.get(name)) for name in CODE_SECTIONS]
    for section, key in CODE_LISTS:
        listed = (values.get(section) or {}).get(key) or ()
        sections += [(f"{section}.{key}.{number}", one) for number, one in enumerate(listed)]
    for key, section in sections:
        if isinstance(section, dict) and section.get("target"):
            yield CodeNeed(f"{key}.target", str(section["target"]))


def _secrets(recipe: Recipe) -> Iterator[Need]:
    for number, tracker in enumerate(recipe.track.to):
        yield from (SecretNeed(f"track.to.{number}", name) for name in tracker.secrets)


def problems_there(needs: Sequence[Need], target: LaunchTarget, here: Here) -> list[Problem]:
    """What the recipe needs and the hosts of a launch surely do not have."""
    return [need.problem(target) for need in needs if need.place(target, here) == "missing"]


def inventory_lines(needs: Sequence[Need], target: LaunchTarget, here: Here) -> list[str]:
    """A line for each thing that is needed: its key, its value and where the hosts find it."""
    width = max((len(need.key) for need in needs), default=0)
    found = [(need, need.place(target, here)) for need in needs]
    lines = [f"needs {need.key:<{width}}  {need.value}: {place}" for need, place in found]
    if any(place == "only if the image has it" for _, place in found):
        folders = ", ".join(f"{folder} ({what})" for folder, what in target.mounted.items())
        lines.append(f"warning: besides the image, the hosts have {folders} alone")
    return lines
