"""Load the trained parameters of a run from one of its checkpoints. The training data is not needed."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import jax

from dtrain.checkpoint import manifest
from dtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from dtrain.checkpoint.partial import UNREAD
from dtrain.checkpoint.store import Store
from dtrain.core.errors import CheckpointError, EnvironmentFault, RecipeError
from dtrain.core.metrics import higher_is_better, recorded
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.core.types import JsonObject
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
    """The parameters of one checkpoint; their average if the optimizer keeps one (`optimizer.ema`)."""

    recipe: Recipe
    assembly: Assembly
    params: Tree
    step: int
    chosen: str
    """The step, why it was chosen, and whether the parameters are averaged: "step 40, the newest"."""
    classes: tuple[str, ...] = ()
    """Names of the classes that it was trained on, if its data has names."""


def load_run(
    place: Folder,
    overrides: Sequence[str],
    say: Callable[[str], None],
    *,
    step: int | None = None,
    best: bool = False,
) -> LoadedRun:
    """Load the parameters of a run's newest checkpoint, its best one, or that of a given step.

    Optimizer state is not read. The mesh is the recipe's if there are enough devices, else a single device. Raises
    RecipeError or CheckpointError if there is no such checkpoint.
    """
    if step is not None and best:
        raise RecipeError("--step and --best cannot be used together", "give one of them")
    refuse_no_run(place)
    recipe, devices = load(place.recipe, overrides), jax.devices()
    if recipe.mesh.least > len(devices):
        recipe = dataclasses.replace(recipe, mesh=Mesh(data=1))  # parameters do not depend on the mesh
    with Store(place.checkpoints.absolute(), recipe.checkpoint, reading=True) as store:
        checkpoint, chosen = choose(place, recipe, store, say, step=step, best=best)
        example = _example(recipe, checkpoint.about)
        assembly = assemble(recipe, devices[: recipe.mesh.least], example, recipe.steps or 2**31)
        state = store.restore(checkpoint.step, parameters_alone(assembly.shapes))
    chosen += " (averaged parameters)" if recipe.optimizer.ema else ""
    classes = tuple(place.read_record().get("classes", ()))
    return LoadedRun(recipe, assembly, averaged(state.optimizer, state.params), checkpoint.step, chosen, classes)


def refuse_no_run(place: Folder) -> None:
    """Raise RecipeError if this is no run folder, CheckpointError if it has no checkpoints."""
    place.refuse_other_kinds()
    if not place.recipe.exists():
        raise RecipeError(f"{place.path} is not a run folder: recipe.yaml is missing", "give a run folder, runs/NAME")
    if not place.checkpoints.is_dir():
        raise CheckpointError(f"{place.path} has no checkpoint yet", "train it first: dtrain run")


def choose(
    place: Folder, recipe: Recipe, store: Store, say: Callable[[str], None], *, step: int | None, best: bool
) -> tuple[Manifest, str]:
    """A run's newest checkpoint, its best one, or that of a given step, checked; and a text that says which it is."""
    if step is None and not best:
        checkpoint = store.newest(say)
        if checkpoint is None:
            raise CheckpointError(f"{place.path} has no checkpoint yet", "train it first: dtrain run")
        return checkpoint, f"step {checkpoint.step}, the newest"
    requested, chosen = _best(place, recipe) if step is None else (step, f"step {step}")
    return _checked(place, requested), chosen


def parameters_alone(shapes: State) -> State:
    """A tree for `Store.restore` that reads only the averaged parameters, or the parameters if no average is kept."""
    import optax

    unread = jax.tree.map(lambda _: UNREAD, shapes)
    average = averaged(shapes.optimizer, None)
    if average is None:
        return dataclasses.replace(unread, params=shapes.params)
    params = jax.tree.map(  # no average is kept of parameters that are not trained
        lambda mean, shape: shape if mean is None else UNREAD, average, shapes.params, is_leaf=lambda leaf: leaf is None
    )
    optimizer = optax.tree_utils.tree_set(unread.optimizer, averaged=average)
    return dataclasses.replace(unread, params=params, optimizer=optimizer)


def _example(recipe: Recipe, about: JsonObject) -> Example:
    """The shapes of the training examples: from the checkpoint, or for older ones from the recipe or the data."""
    if "example" in about:
        return example_of(about["example"])
    return recipe.data.example() or recipe.data.open("train").example


def _best(place: Folder, recipe: Recipe) -> tuple[int, str]:
    """The step with the best value of `checkpoint.best`, the newest of equal ones, and a text that explains it."""
    name, known = recipe.checkpoint.best, {}
    if name is None:
        hint = f"set checkpoint.best before training, or use --step; saved steps: {_saved(place)}"
        raise RecipeError("--best: the recipe has no checkpoint.best, so checkpoints have no metric", hint)
    for step in saved_steps(place.checkpoints):
        with suppress(CorruptCheckpoint, OSError):  # a damaged checkpoint is not a candidate
            known[step] = manifest.read(place.checkpoints / str(step)).metrics.get(name, math.nan)
    known = {step: value for step, value in known.items() if math.isfinite(value)}
    if not known:
        hint = f"use --step; saved steps: {_saved(place)}"
        raise CheckpointError(f"--best: no checkpoint of {place.path} has a value of {name}", hint)
    up = higher_is_better(name, recorded(place.read_record()))
    if up is None:
        raise RecipeError(f"--best: it is not known whether a higher or a lower {name} is better", "use --step")
    step = (max if up else min)(known, key=lambda step: known[step])
    return step, f"step {step}, the best of {len(known)} by {name}: {known[step]:.6g}"


def _checked(place: Folder, step: int) -> Manifest:
    """The manifest of that step, after every file was compared with its digest."""
    if step not in saved_steps(place.checkpoints):
        raise CheckpointError(f"{place.path} has no checkpoint of step {step}", f"saved steps: {_saved(place)}")
    try:
        return manifest.check(place.checkpoints / str(step), jax.process_index(), jax.process_count())
    except CorruptCheckpoint as error:
        raise CheckpointError(f"checkpoint {step} is damaged: {error}", f"saved steps: {_saved(place)}") from error
    except OSError as error:
        raise EnvironmentFault(f"checkpoint {step} cannot be read: {error}") from error


def _saved(place: Folder) -> str:
    return ", ".join(map(str, sorted(saved_steps(place.checkpoints))))
