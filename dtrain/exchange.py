"""Parameters into a run and out of one, by safetensors files, under our names or the published ones."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtrain.assembly import assemble
from dtrain.checkpoint.store import Store
from dtrain.checkpoint.tensors import Tensors, opened, write
from dtrain.errors import DataError, RecipeError
from dtrain.folder import Folder, folder, overwrite, saved_steps
from dtrain.lease import leased
from dtrain.models.decoder import Decoder
from dtrain.models.published import HEAD, UNUSED, Place, Whole, places
from dtrain.parallel.mesh import visible
from dtrain.params import Param, Tree, paths
from dtrain.recipe.load import text
from dtrain.recipe.recipe import Recipe
from dtrain.record import beside
from dtrain.resume import Start
from dtrain.train.audit import audit
from dtrain.train.state import born
from dtrain.trained import Trained

SHOWN = 8
PREFIX = "transformer."
"""That GPT-2's names have in some files."""


def bring(recipe: Recipe, runs: Path, source: Path, say: Callable[[str], None]) -> Folder:
    """A run whose step 0 has the parameters of a file or folder; `dtrain run` goes on from there.

    RecipeError where the run has steps already; DataError where the tensors are not the model's.
    """
    place = folder(runs, recipe.name)
    place.prepare()
    if saved_steps(place.checkpoints):
        raise RecipeError(f"{place.path} has saved steps already", "give this run another name: name=...")
    train = recipe.data.open("train")
    made = assemble(recipe, jax.devices(), train.example, recipe.total_steps(len(train)))
    with opened(source) as tensors:
        params = read(tensors, recipe.model, made.layout.declared, made.shapes.params, source)
    state = born(made.make, made.shapes, params)
    with (
        leased(place.lease, say) as lease,
        Store(place.checkpoints.absolute(), recipe.checkpoint, holds=lease.holds) as store,
    ):
        overwrite(place.recipe, text(recipe))
        about = beside(recipe, visible(made.layout.sizes), train, 0, 0, owed=False, seen=Start().seen, step_s=0.0)
        store.save(0, state, about, {}, audit(0, state).checksum)
        store.wait()
    return place


def take(found: Trained, path: Path, published: bool) -> None:
    """Write the parameters, whole, to one file. RecipeError where the model has no published names."""
    declared, values = _by_path(found.made.layout.declared), _by_path(found.params)
    table = _table(found.recipe.model, declared) if published else _own(declared)
    together: dict[str, dict[int, np.ndarray]] = {}
    for name, param in declared.items():
        place, whole = table[name], np.asarray(jax.device_get(values[name]))
        tensors = place.names(param)
        for tensor, part in zip(tensors, whole.reshape(len(tensors), -1), strict=True):
            together.setdefault(tensor, {})[place.part] = place.write(part, param)
    side_by_side = {
        tensor: np.ascontiguousarray(np.concatenate([parts[i] for i in sorted(parts)], -1))
        for tensor, parts in together.items()
    }
    write(path, side_by_side, {"dtrain": f"{found.recipe.name} at step {found.step}"})


def read(tensors: Tensors, model: Any, declared: Tree, shapes: Tree, source: Path) -> Tree:
    """The parameters in their places, from our names or the published ones."""
    ours = _by_path(declared)
    table = _own(ours) if ours.keys() <= set(tensors) else _table(model, ours)
    prefix = PREFIX if f"{PREFIX}wte.weight" in tensors else ""
    wanted = {
        f"{prefix}{tensor}": table[name].shape(param)
        for name, param in ours.items()
        for tensor in table[name].names(param)
    }
    twice = {HEAD} if HEAD in tensors and HEAD not in wanted and "embed" in table else set()
    _refuse_unlike(tensors, wanted, twice, source)
    if twice and not np.array_equal(tensors[HEAD], tensors[f"{prefix}{table['embed'].name}"]):
        raise DataError(
            f"{source}: {HEAD} is not the embedding, and the recipe's model is tied", "set model.tied: false"
        )

    def leaf(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        place, param = table[name], ours[name]
        parts = [place.read(tensors[f"{prefix}{tensor}"], param) for tensor in place.names(param)]
        values = np.stack(parts).reshape(param.shape).astype(like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index])

    return jax.tree.map(leaf, paths(declared), shapes)


def _refuse_unlike(tensors: Tensors, wanted: Mapping[str, tuple[int, ...]], passed: set[str], source: Path) -> None:
    problems = [
        *(f"{name} is missing" for name in wanted if name not in tensors),
        *(
            f"{name} is no parameter of the model"
            for name in tensors
            if name not in wanted.keys() | passed and not UNUSED.search(name)
        ),
        *(
            f"{name} is {tensors.shape(name)}, the model's is {shape}"
            for name, shape in wanted.items()
            if name in tensors and tensors.shape(name) != shape
        ),
    ]
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        head = f"{source} does not hold this recipe's model:"
        raise DataError("\n  ".join([head, *problems[:SHOWN], *more]), "hold the recipe's sizes against the file's")


def _own(declared: Mapping[str, Param]) -> dict[str, Place]:
    return {name: Whole(name) for name in declared}


def _table(model: Any, declared: Mapping[str, Param]) -> dict[str, Place]:
    table = places(model) if isinstance(model, Decoder) else {}
    nameless = [name for name in declared if name not in table]
    if nameless:
        message = f"parameter {nameless[0]} has no published name"
        raise RecipeError(f"{message}: models of kind {model.kind} go by dtrain's own names" if not table else message)
    return table


def _by_path(tree: Tree) -> dict[str, Any]:
    return dict(zip(jax.tree.leaves(paths(tree)), jax.tree.leaves(tree), strict=True))
