"""What a run has learned: its newest sound checkpoint, on the devices at hand."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dtrain.assembly import Assembly, assemble
from dtrain.checkpoint.store import Store
from dtrain.errors import CheckpointError, RecipeError
from dtrain.folder import Folder
from dtrain.optim.update import averaged
from dtrain.parallel.mesh import Mesh
from dtrain.params import Tree
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Recipe


@dataclass(frozen=True)
class Trained:
    """A run's newest parameters, averaged where its optimizer averages them."""

    recipe: Recipe
    made: Assembly
    params: Tree
    step: int


def trained(place: Folder, overrides: Sequence[str], say: Callable[[str], None]) -> Trained:
    """The newest checkpoint of a run; RecipeError or CheckpointError where there is none.

    The mesh is the recipe's where there are devices enough, else one device.
    """
    if not place.recipe.exists():
        raise RecipeError(f"{place.path} holds no run: recipe.yaml is missing", "give a run's folder, runs/NAME")
    recipe, devices = load(place.recipe, overrides), jax.devices()
    if recipe.mesh.least > len(devices):
        recipe = dataclasses.replace(recipe, mesh=Mesh(data=1))  # a mesh changes where numbers are, not what they are
    example: Any = recipe.data.example() or recipe.data.open("train").example
    made = assemble(recipe, devices[: recipe.mesh.least], example, recipe.steps or 2**31)
    if not place.checkpoints.is_dir():
        raise CheckpointError(f"{place.path} has no checkpoint yet", "train it first: dtrain run")
    with Store(place.checkpoints.absolute(), recipe.checkpoint, reading=True) as store:
        newest = store.newest(say)
        if newest is None:
            raise CheckpointError(f"{place.path} has no checkpoint yet", "train it first: dtrain run")
        state = store.restore(newest.step, made.shapes)
    return Trained(recipe, made, averaged(state.optimizer, state.params), newest.step)
