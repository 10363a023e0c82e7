"""The trained parameters of a run, from one of its checkpoints, on the devices at hand. No training data is needed."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

from dtrain.checkpoint import manifest
from dtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from dtrain.checkpoint.partial import UNREAD
from dtrain.checkpoint.store import Store
from dtrain.core.errors import CheckpointError, EnvironmentFault, RecipeError
from dtrain.core.metrics import higher_is_better
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.data.batch import Example, example_of
from dtrain.models.nn.param import Tree
from dtrain.optim.update import averaged
from dtrain.parallel.mesh import Mesh
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Recipe
from dtrain.train.assembly import Assembly, assemble
from dtrain.train.state import State


@dataclass(frozen=True)
class LoadedRun:
    """The parameters of one checkpoint, averaged where its optimizer averages them."""

    recipe: Recipe
    assembly: Assembly
    params: Tree
    step: int
    chosen: str
    """The step, why this one, and whether it is the average: "step 40, the newest"."""


def load_run(
    place: Folder,
    overrides: Sequence[str],
    say: Callable[[str], None],
    *,
    step: int | None = None,
    best: bool = False,
) -> LoadedRun:
    """The parameters of a run's newest checkpoint, of its best, or of a given step; nothing else is restored.

    RecipeError or CheckpointError where there is none. The mesh is the recipe's where there are devices enough,
    else one device.
    """
    if step is not None and best:
        raise RecipeError("--step and --best name a checkpoint each", "give one of them")
    place.refuse_other_kinds()
    if not place.recipe.exists():
        raise RecipeError(f"{place.path} holds no run: recipe.yaml is missing", "give a run's folder, runs/NAME")
    recipe, devices = load(place.recipe, overrides), jax.devices()
    if recipe.mesh.least > len(devices):
        recipe = dataclasses.replace(recipe, mesh=Mesh(data=1))  # a mesh changes where numbers are, not what they are
    if not place.checkpoints.is_dir():
        raise CheckpointError(f"{place.path} has no checkpoint yet", "train it first: dtrain run")
    with Store(place.checkpoints.absolute(), recipe.checkpoint, reading=True) as store:
        if step is None and not best:
            found = store.newest(say)
            if found is None:
                raise CheckpointError(f"{place.path} has no checkpoint yet", "train it first: dtrain run")
            chosen = f"step {found.step}, the newest"
        else:
            wanted, chosen = _best(place, recipe) if step is None else (step, f"step {step}")
            found = _sound(place, wanted)
        assembly = assemble(recipe, devices[: recipe.mesh.least], _example(recipe, found.about), recipe.steps or 2**31)
        state = store.restore(found.step, parameters_alone(assembly.shapes))
    chosen += " (averaged parameters)" if recipe.optimizer.ema else ""
    return LoadedRun(recipe, assembly, averaged(state.optimizer, state.params), found.step, chosen)


def parameters_alone(shapes: State) -> State:
    """The shapes of the averaged parameters where they are kept, else of the parameters; the rest is not read."""
    import optax

    unread = jax.tree.map(lambda _: UNREAD, shapes)
    average = averaged(shapes.optimizer, None)
    if average is None:
        return dataclasses.replace(unread, params=shapes.params)
    return dataclasses.replace(unread, optimizer=optax.tree_utils.tree_set(unread.optimizer, averaged=average))


def _example(recipe: Recipe, about: Mapping[str, Any]) -> Example:
    """The shapes that the run was trained on: from the checkpoint, or in older ones from the recipe or the data."""
    if "example" in about:
        return example_of(about["example"])
    return recipe.data.example() or recipe.data.open("train").example


def _best(place: Folder, recipe: Recipe) -> tuple[int, str]:
    """The checkpoint whose metric is the best, the newest of several that are."""
    name, known = recipe.checkpoint.best, {}
    if name is None:
        hint = f"set it before training, or choose with --step; saved: {_saved(place)}"
        raise RecipeError("--best: the recipe has no checkpoint.best, so no checkpoint was measured", hint)
    for step in saved_steps(place.checkpoints):
        with suppress(CorruptCheckpoint, OSError):  # a damaged one is not measured either
            known[step] = manifest.read(place.checkpoints / str(step)).metrics.get(name, math.nan)
    known = {step: value for step, value in known.items() if math.isfinite(value)}
    if not known:
        hint = f"choose with --step; saved: {_saved(place)}"
        raise CheckpointError(f"--best: {name} was measured at no checkpoint of {place.path}", hint)
    up = higher_is_better(name, place.read_record().get("rising", {}))
    if up is None:
        raise RecipeError(f"--best: it is not known whether a higher or a lower {name} is better", "choose with --step")
    step = (max if up else min)(known, key=lambda step: known[step])
    return step, f"step {step}, the best of {len(known)} by {name}: {known[step]:.6g}"


def _sound(place: Folder, step: int) -> Manifest:
    """The manifest of that step, after every file was compared with its digest."""
    if step not in saved_steps(place.checkpoints):
        raise CheckpointError(f"{place.path} has no checkpoint of step {step}", f"saved: {_saved(place)}")
    try:
        return manifest.check(place.checkpoints / str(step), jax.process_index(), jax.process_count())
    except CorruptCheckpoint as error:
        raise CheckpointError(f"checkpoint {step} is damaged: {error}", f"saved: {_saved(place)}") from error
    except OSError as error:
        raise EnvironmentFault(f"checkpoint {step} cannot be read: {error}") from error


def _saved(place: Folder) -> str:
    return ", ".join(map(str, sorted(saved_steps(place.checkpoints))))
