"""Where a start of a run finds the parameters that do not come from its own checkpoints."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.checkpoint import manifest
from dtrain.core.errors import CheckpointError, RecipeError
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.core.types import JsonObject
from dtrain.models.distillation import TEACHER, Distillation
from dtrain.models.lora import BASE
from dtrain.recipe.recipe import Init, Recipe


class Frozen(NamedTuple):
    """Where frozen parameters of a run come from."""

    init: Init
    checksum: tuple[int, ...]


def recorded(place: Folder, part: str, init: Init) -> Frozen:
    """Where the frozen parameters of that part come from, as the run's checkpoints record it.

    `init`: where the recipe has them; used if the recorded folder is not there. CheckpointError if none records it.
    """
    for step in saved_steps(place.checkpoints):
        with suppress(manifest.CorruptCheckpoint, OSError):
            about = manifest.read(place.checkpoints / str(step)).about
            if part in about:
                return Frozen(_same(about[part], part, init), tuple(about[part]["checksum"]))
    raise CheckpointError(f"{place.path} has no checkpoint that records its {part}", "start a new run: name=...")


def _same(values: JsonObject, part: str, init: Init) -> Init:
    """Where the recorded values are: at the recorded path, or, if that is gone, where the recipe has them."""
    key = "run" if "run" in values else "weights"
    path, given = Path(values[key]), Path(init.text).absolute()
    if path.exists() and given.exists() and not given.samefile(path):
        message = f"the {part} of a run cannot change: it was started with {path}, the recipe names {init.text}"
        raise RecipeError(message, "start a new run: name=...")
    if not path.exists() and not getattr(init, key):
        message = f"{path} is not there; the frozen parameters of this run come from it"
        raise CheckpointError(message, "restore that folder")
    if path.exists():
        changed: dict[str, Any] = {"run": "", "weights": "", "step": "newest", key: str(path)}
        init = replace(init, **changed | ({} if key == "run" else {"map": {}}))
    return replace(init, step=values["step"]) if key == "run" else init


def elsewhere(recipe: Recipe, place: Folder) -> dict[str, Frozen]:
    """What a start of the run takes from elsewhere, by the part of its parameters; "" for all of its own.

    Everything that `init` gives before the first save; after it, only the parameters that are frozen.
    """
    found: dict[str, Frozen] = {}
    init, saves = recipe.init, bool(saved_steps(place.checkpoints))
    if init and (recipe.lora or not saves):
        part = BASE if recipe.lora else ""
        found[part] = recorded(place, part, init) if saves else Frozen(init, ())
    if isinstance(recipe.objective, Distillation):
        teacher = recipe.objective.teacher
        init = Init(run=teacher.run, weights=teacher.weights, step=teacher.step)
        found[TEACHER] = recorded(place, TEACHER, init) if saves else Frozen(init, ())
    return found
