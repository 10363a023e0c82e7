"""Load the trained parameters of a run from one of its checkpoints. The training data is not needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax

from dtrain.assembly.assemble import Assembly, assemble
from dtrain.assembly.state import State, completed, placement, saved
from dtrain.assembly.user_modules import changed_modules
from dtrain.checkpoint.partial import UNREAD
from dtrain.checkpoint.store import Store
from dtrain.core.errors import RecipeError
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject
from dtrain.data.batch import Example, example_of
from dtrain.data.prediction_inputs import opened_in_order, with_classes
from dtrain.data.source import Data, Source, Split
from dtrain.models.lora import ADAPTERS, Lora, merged
from dtrain.models.nn.param import Tree
from dtrain.optim.update import averaged
from dtrain.parallel.mesh import Mesh
from dtrain.recipe.load import load
from dtrain.recipe.recipe import UNKNOWN_STEPS, Recipe
from dtrain.weights.checkpoint_choice import recipe_of, refuse_no_run, select_checkpoint
from dtrain.weights.initial import initial_from, recorded_sources
from dtrain.weights.read import leaves_by_path, without_padding

NAMES = {"test": "held-out", "train": "training"}
"""What the examples of a split are called."""


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
    adapters: Mapping[str, Tree] = field(default_factory=dict)
    """The adapters, by path, of a run with `lora`; `params` are then the sums of base and adapters."""
    lora: Lora | None = None
    """The recipe's section of a run with adapters; `recipe` is then that of the model itself."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Of each split of the data that the run was trained with; empty where other data was named."""

    as_trained: "Callable[[], LoadedRun] | None" = None
    """Loads a run with adapters as it was trained, with its objective: base and adapters apart."""

    fitted: JsonObject = field(default_factory=dict)
    """What was computed from the examples that it was trained on: the kind of data, and values."""

    def split(self, split: Split, say: Callable[[str], None], of: Data | None = None) -> Source:
        """The examples of a split, of the run's own data or of other data, each once and in order, as the model is used
        to them: scaled as in training, with the labels of the classes that it was trained on.

        `say` gets a warning if the run's own are not those that it was trained with any more.
        """
        data = self.recipe.data if of is None else as_fitted(of, self.fitted)
        source = opened_in_order(data, split)
        known = self.fingerprints.get(split) if of is None else None
        if known and (source if data.in_order() is data else data.open(split)).fingerprint != known:
            say(f"warning: the {NAMES[split]} examples are not those of the run: its data was changed since")
        return with_classes(source, self.classes)


def load_run(
    run_dir: Folder,
    overrides: Sequence[str],
    say: Callable[[str], None],
    *,
    step: int | None = None,
    best: bool = False,
    joined: bool = True,
) -> LoadedRun:
    """Load the parameters of a run's newest checkpoint, its best one, or that of a given step.

    Optimizer state is not read. `joined`: adapters are added to their base; else the model is as it was trained, with
    its objective. The mesh is the recipe's if there are enough devices, else a single device. Raises
    RecipeError or CheckpointError if there is no such checkpoint.
    """
    if step is not None and best:
        raise RecipeError("--step and --best cannot be used together", "give one of them")
    refuse_no_run(run_dir)
    recipe, devices, record = load(run_dir.recipe, overrides), jax.devices(), run_dir.read_record()
    fitted: JsonObject = record.get("fitted") or {}
    with Store(run_dir.checkpoints.absolute(), recipe.checkpoint, reading=True) as store:
        checkpoint, chosen = select_checkpoint(run_dir, recipe, store, say, step=step, best=best)
        recipe = recipe_of(checkpoint, run_dir, recipe, say, overrides)
        recipe = replace(recipe, data=as_fitted(recipe.data, fitted))
        if recipe.mesh.least > len(devices):
            recipe = replace(recipe, mesh=Mesh(data=1))  # parameters do not depend on the mesh
        if recipe.minimised.sources():
            recipe = replace(recipe, objective=None)  # what it takes from elsewhere is not needed
        example = _example(recipe, checkpoint.conditions)
        assembly = assemble(recipe, devices[: recipe.mesh.least], example, recipe.steps or UNKNOWN_STEPS)
        for line in changed_modules(checkpoint.conditions.get("code", {}), recipe):
            say(f"warning: {line}")
        shapes = saved(assembly.shapes, assembly.layout.declared)
        state = store.restore(checkpoint.step, parameters_alone(shapes))
    chosen += " (averaged parameters)" if recipe.optimizer.averages else ""
    classes = tuple(record.get("classes") or ())
    state = completed(state, assembly.layout.declared, not_saved(run_dir, assembly, say))
    params = averaged(state.optimizer, state.params)
    own = not any(one.partition("=")[0].partition(".")[0] == "data" for one in overrides)
    known = (record.get("data") or {}).get("fingerprints", {}) if own else {}
    loaded = LoadedRun(recipe, assembly, params, checkpoint.step, chosen, classes, fingerprints=known, fitted=fitted)
    if not recipe.lora or not joined:
        return loaded
    as_trained = partial(load_run, run_dir, overrides, lambda _: None, step=checkpoint.step, joined=False)
    return replace(without_adapters(loaded, joiner(assembly, example)), as_trained=as_trained)


def as_fitted(data: Any, fitted: JsonObject) -> Any:
    """The data, read as that of a run which recorded this; as it is if nothing was recorded of data of its kind."""
    return data.with_fitted(fitted["values"]) if fitted and fitted["kind"] == data.kind else data


def not_saved(run_dir: Folder, assembly: Assembly, say: Callable[[str], None]) -> dict[str, jax.Array]:
    """The frozen parameters that the run's checkpoints do not have, by path."""
    found = recorded_sources(assembly.recipe, run_dir)
    parts = (initial_from(assembly, origin, say, part) for part, origin in found.items())
    return {name: value for part in parts for name, value in part.read().items()}


class Joiner(NamedTuple):
    """Adds adapters to their base; compiled once for all states of a run."""

    assembly: Assembly
    """Of the model itself."""
    join: Callable[[Tree], Tree]


def joiner(assembly: Assembly, example: Example) -> Joiner:
    """The joiner for states of a run with adapters."""
    recipe, lora = replace(assembly.recipe, lora=None, init=None, objective=None), assembly.recipe.lora
    assert lora is not None
    plain = assemble(recipe, assembly.layout.devices, example, assembly.steps)
    join = jax.jit(lambda params: merged(params, lora), out_shardings=placement(plain.shapes.params))
    return Joiner(plain, join)


def without_adapters(loaded: LoadedRun, by: Joiner) -> LoadedRun:
    """The run as one of the model itself, whose parameters are the sums of base and adapters."""
    recipe = replace(loaded.recipe, lora=None, init=None, objective=None)
    adapters = {f"{ADAPTERS}.{name}": pair for name, pair in loaded.params[ADAPTERS].items()}
    params = by.join(loaded.params)
    return replace(
        loaded, recipe=recipe, assembly=by.assembly, params=params, adapters=adapters, lora=loaded.recipe.lora
    )


def parameters_alone(shapes: State) -> State:
    """A tree for `Store.restore` that reads only the averaged parameters, or the parameters if no average is kept."""
    import optax

    unread = jax.tree.map(lambda _: UNREAD, shapes)
    average = averaged(shapes.optimizer, None)
    if average is None:
        return replace(unread, params=shapes.params)
    params = jax.tree.map(  # no average is kept of parameters that are not trained
        lambda mean, shape: shape if mean is None else UNREAD, average, shapes.params, is_leaf=lambda leaf: leaf is None
    )
    optimizer = optax.tree_utils.tree_set(unread.optimizer, averaged=average)
    return replace(unread, params=params, optimizer=optimizer)


def _example(recipe: Recipe, conditions: JsonObject) -> Example:
    """The shapes of the training examples: from the checkpoint, or for older ones from the recipe or the data."""
    if "example" in conditions:
        return example_of(conditions["example"])
    return recipe.data.example() or recipe.data.open("train").example


def values_of(loaded: LoadedRun) -> dict[str, jax.Array]:
    """The trained values by path, without padding."""
    shapes, values = without_padding(loaded.assembly.layout.declared), leaves_by_path(loaded.params)
    slices = {name: tuple(slice(size) for size in param.shape) for name, param in shapes.items()}
    return {name: value if value.shape == shapes[name].shape else value[slices[name]] for name, value in values.items()}
