"""The user's own modules that a recipe names: their digests, and what changed since a checkpoint was saved."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dtrain.core.files import digest
from dtrain.recipe.recipe import Recipe


def user_modules(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The name and the digest of each imported module that the recipe names, and of those imported from its folder.

    Call it soon after they were imported: it reads their files, which may change later.
    """
    targets = {getattr(part, "target", None) for part in (recipe.model, recipe.data, recipe.optimizer)}
    for target in sorted(name for name in targets if isinstance(name, str) and not name.startswith("optax:")):
        module = sys.modules.get(target.partition(":")[0])
        origin = Path(getattr(module, "__file__", None) or "")
        if origin.suffix == ".py":
            yield from ((name, digest(path)) for name, path in sorted(_imported_from(origin.parent).items()))


def changed_modules(saved: Mapping[str, str], recipe: Recipe) -> Iterator[str]:
    """A line for each of these modules that is another now than the one whose digest a checkpoint has."""
    for name, now in user_modules(recipe):
        if (was := saved.get(name)) and was != now:
            yield (
                f"{name} was changed since this checkpoint was saved (was {was}, now {now}): other code than the one "
                "that trained these parameters uses them"
            )


def _imported_from(folder: Path) -> dict[str, Path]:
    """The files of imported modules under a folder, by relative path, without installed packages."""
    files = {}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix != ".py" or name.partition(".")[0] == "dtrain" or not path.is_relative_to(folder):
            continue
        inside = path.relative_to(folder)
        if not any(part.startswith(".") or part in ("site-packages", "dist-packages") for part in inside.parts):
            files[str(inside)] = path
    return files
