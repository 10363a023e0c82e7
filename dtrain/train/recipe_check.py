"""Whether the run in a folder is the one that is asked for: done already, or of a recipe that changed."""

from typing import Any

from dtrain.core.errors import EnvironmentFault, RecipeError, cause
from dtrain.core.run_dir import Folder, read_regular, saved_steps
from dtrain.recipe import yaml
from dtrain.recipe.load import differences, text
from dtrain.recipe.recipe import Recipe


def finished(place: Folder, recipe: Recipe) -> bool:
    """Whether this very run was done to its end."""
    old = place.read_record()
    if old.get("state") != "finished" or not place.recipe.exists() or old["step"] < (recipe.steps or 0):
        return False
    before, now = _saved_recipe(place), _plain(recipe)
    length = lambda tree: (tree.get("steps"), tree.get("epochs"))  # noqa: E731
    return length(before) == length(now) and not differences(before, now)


def refuse_changes(place: Folder, recipe: Recipe, allowed: bool) -> None:
    """RecipeError with the differences, where a run that has saved state is started with another recipe."""
    if allowed or not saved_steps(place.checkpoints):
        return
    if not place.recipe.exists():
        hint = "put it back, give this run another name (name=...), or go on unchecked with --allow-changes"
        raise RecipeError(f"{place.path} has saved steps but no recipe.yaml to hold this recipe against", hint)
    changed = differences(_saved_recipe(place), _plain(recipe))
    if changed:
        hint = "give this run another name (name=...), or go on under the changed recipe with --allow-changes"
        head = f"the recipe changed under {place.path}, which has saved steps:"
        raise RecipeError([head, *(f"  {line}" for line in changed)], hint)


def _saved_recipe(place: Folder) -> dict[str, Any]:
    """recipe.yaml as plain values; EnvironmentFault where it is damaged."""
    hint = "put it back, give this run another name (name=...), or move it away and resume with --allow-changes"
    try:
        found = yaml.parse(read_regular(place.recipe).decode(), str(place.recipe)).plain()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentFault(f"{place.recipe} cannot be read: {cause(error)}", hint) from error
    except RecipeError as error:
        raise EnvironmentFault(f"{place.recipe} is damaged: {' '.join(error.message.split())}", hint) from error
    if not isinstance(found, dict) or not found.keys() >= {"model", "data", "optimizer"}:
        raise EnvironmentFault(f"{place.recipe} is damaged: it holds no recipe", hint)
    if not all(isinstance(found[key], dict) for key in ("model", "data", "optimizer")):
        raise EnvironmentFault(f"{place.recipe} is damaged: a section of it is no mapping", hint)
    return found


def _plain(recipe: Recipe) -> dict[str, Any]:
    return yaml.parse(text(recipe), "recipe").plain()
