"""Compare a recipe with the run in its folder: finished already, or of another recipe."""

import dataclasses
import json
from contextlib import suppress
from typing import Any

from dtrain.checkpoint.manifest import has_checkpoint
from dtrain.core.errors import EnvironmentFault, RecipeError, cause
from dtrain.core.files import read_regular
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.core.types import JsonObject
from dtrain.recipe import yaml
from dtrain.recipe.load import differences, draft, lasting_text, plain_part
from dtrain.recipe.recipe import Recipe
from dtrain.recipe.sizes import with_sizes

AS_WRITTEN = "model_as_written"
"""Where run.json has the model section of a recipe that leaves out sizes; recipe.yaml has it with the data's sizes."""


def as_written(recipe: Recipe) -> JsonObject:
    """What run.json keeps of a recipe that leaves out sizes, for `finished`."""
    return {AS_WRITTEN: _json(_plain(recipe)["model"])} if recipe.model.left_out else {}


def _json(value: Any) -> Any:
    """The value as run.json gives it back: lists in place of tuples."""
    return json.loads(json.dumps(value))


def finished(run_dir: Folder, recipe: Recipe) -> bool:
    """Whether the folder has a finished run of this recipe with this length."""
    old = run_dir.read_record()
    if old.get("state") != "finished" or not run_dir.recipe.exists():
        return False
    if not has_checkpoint(run_dir, old["step"]):
        return False  # what it trained last is lost: it is trained again, from the checkpoint before
    early = old.get("early")
    if early and (recipe.stop is None or early["stop"] != plain_part(recipe.stop)):
        return False
    if not early and old["step"] < (recipe.steps or 0):
        return False
    before, now = _saved_recipe(run_dir), _plain(recipe)
    if recipe.model.left_out and _json(now["model"]) == old.get(AS_WRITTEN):
        now["model"] = before["model"]  # the sizes that were taken from the data, which need not be there any more
    former = [change.get("length") for change in old.get("changes", ())]  # it was extended since
    if list(_length(now)) not in [list(_length(before)), *former]:
        return False
    return not differences(before, now | {"steps": before.get("steps"), "epochs": before.get("epochs")})


def saved_length(run_dir: Folder) -> tuple[Any, Any]:
    """The steps and epochs in the folder's recipe.yaml; None for both if it cannot be read."""
    with suppress(EnvironmentFault):
        return _length(_saved_recipe(run_dir))
    return None, None


def _length(tree: JsonObject) -> tuple[Any, Any]:
    return tree.get("steps"), tree.get("epochs")


def refuse_changes(run_dir: Folder, recipe: Recipe, allowed: bool) -> list[str]:
    """Raise RecipeError with the differences if a run that has saved steps is started with another recipe.

    With `allowed`, the differences are returned.
    """
    if not saved_steps(run_dir.checkpoints) or (allowed and not run_dir.recipe.exists()):
        return []
    if not run_dir.recipe.exists():
        hint = "restore it, give this run another name (name=...), or resume without this check: --allow-changes"
        raise RecipeError(f"{run_dir.path} has saved steps but no recipe.yaml to compare this recipe with", hint)
    if allowed:
        with suppress(EnvironmentFault):  # the saved recipe is damaged
            return differences(_saved_recipe(run_dir), _plain(recipe))
        return []
    changed = differences(_saved_recipe(run_dir), _plain(recipe))
    if changed:
        hint = "give this run another name (name=...), or resume with the changed recipe: --allow-changes"
        head = f"the recipe changed since {run_dir.path} was started, which has saved steps:"
        raise RecipeError([head, *(f"  {line}" for line in changed)], hint, "E-CHANGED")
    return []


def refuse_other_changes(run_dir: Folder, recipe: Recipe) -> None:
    """Raise RecipeError if more than the length of a run that has saved steps changed."""
    if saved_steps(run_dir.checkpoints) and run_dir.recipe.exists():
        saved, recipe = _saved_recipe(run_dir), with_sizes(recipe)
        refuse_changes(
            run_dir, dataclasses.replace(recipe, steps=saved.get("steps"), epochs=saved.get("epochs")), False
        )


def _saved_recipe(run_dir: Folder) -> JsonObject:
    """recipe.yaml as plain values. Raises EnvironmentFault if it is damaged."""
    hint = "restore it, give this run another name (name=...), or move it away and resume with --allow-changes"
    try:
        saved = yaml.parse(read_regular(run_dir.recipe).decode(), str(run_dir.recipe)).plain()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentFault(f"{run_dir.recipe} cannot be read: {cause(error)}", hint) from error
    except RecipeError as error:
        raise EnvironmentFault(f"{run_dir.recipe} is damaged: {' '.join(error.message.split())}", hint) from error
    if not isinstance(saved, dict) or not saved.keys() >= {"model", "data", "optimizer"}:
        raise EnvironmentFault(f"{run_dir.recipe} is damaged: it is not a recipe", hint)
    if not all(isinstance(saved[key], dict) for key in ("model", "data", "optimizer")):
        raise EnvironmentFault(f"{run_dir.recipe} is damaged: model, data or optimizer is not a mapping", hint)
    with suppress(RecipeError):  # with the defaults of keys that the version which wrote it did not have
        return _plain(draft(run_dir.recipe).recipe())
    return saved


def _plain(recipe: Recipe) -> JsonObject:
    return yaml.parse(lasting_text(recipe), "recipe").plain()
