"""Import parameters into a run, from safetensors files with dtrain's or the published names, or from a run."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtrain.checkpoint.store import Store
from dtrain.checkpoint.tensors import InMemory, Tensors, opened
from dtrain.core.errors import DataError, DtrainError, RecipeError
from dtrain.core.lease import Lease, hold_lease
from dtrain.core.run_dir import Folder, folder, overwrite, saved_steps
from dtrain.data.batch import Example
from dtrain.data.source import UNKNOWN, Arrays
from dtrain.models.agreement import agree, record
from dtrain.models.decoder import Decoder
from dtrain.models.nn.param import Param, Tree, paths
from dtrain.models.published import HEAD, UNUSED, Place, Whole, places
from dtrain.recipe.load import text
from dtrain.recipe.recipe import Recipe
from dtrain.train.assembly import Assembly, assemble
from dtrain.train.checksum import state_checksum
from dtrain.train.load import LoadedRun, load_run
from dtrain.train.provenance import about, conditions
from dtrain.train.resume import Start
from dtrain.train.state import create_state

SHOWN = 8
"""Differences that an error message lists."""
PREFIX = "transformer."
"""Prefix of GPT-2's parameter names in some files."""
EMBEDDINGS = {"GPT-2": ("wte.weight", f"{PREFIX}wte.weight"), "Llama": ("model.embed_tokens.weight",)}
"""Names of the embedding in files of each architecture."""
Say = Callable[[str], None]


def import_params(recipe: Recipe, runs: Path, source: Path, say: Say, *, allow_changes: bool = False) -> Folder:
    """Create a run whose step 0 has the parameters of a file, a folder of files, or another run, for `dtrain run`.

    Raises RecipeError if the run has saved steps already, DataError if the tensors, or the settings recorded with
    them, do not match the model. With `allow_changes`, other settings are only reported.
    """
    if recipe.lora:
        hint = "import them into a run of a recipe without lora, and name that run in init"
        raise RecipeError("lora: a run with adapters saves no other parameters", hint)
    place = folder(runs, recipe.name)
    _refuse_steps(place)
    example = recipe.data.example() or recipe.data.open("train").example
    assembly = assemble(recipe, jax.devices(), example, recipe.steps or 2**31)
    before = place.path.is_dir()
    place.prepare()
    with hold_lease(place.lease, say) as lease:
        _refuse_steps(place)  # again: a run may have saved a step before the lock was taken
        try:
            with _tensors(source, say) as tensors:
                table = naming(tensors, recipe.model, unpadded(assembly.layout.declared))
                published = not any(isinstance(entry, Whole) for entry in table.values())
                agree(recipe.model, tensors.metadata, source, say, published=published, allowed=allow_changes)
                params = read(tensors, recipe.model, assembly.layout.declared, assembly.shapes.params, source)
        except DtrainError:
            if not before:
                shutil.rmtree(place.path, ignore_errors=True)
            raise
        _save(assembly, params, example, place=place, lease=lease, source=source)
    return place


def _refuse_steps(place: Folder) -> None:
    if saved_steps(place.checkpoints):
        raise RecipeError(f"{place.path} already has saved steps", "give this run another name: name=...")


def _save(assembly: Assembly, params: Tree, example: Example, place: Folder, lease: Lease, source: Path) -> None:
    """Save the parameters as step 0 of the run."""
    recipe, state = assembly.recipe, create_state(assembly.make, assembly.shapes, by_path(params))
    with Store(place.checkpoints.absolute(), recipe.checkpoint, holds=lease.check) as store:
        overwrite(place.recipe, text(recipe))
        data = Arrays({}, example, UNKNOWN)
        notes = about(
            conditions(assembly), recipe, data, 0, 0, eval_pending=False, guard_state=Start().guard_state, step_s=0.0
        )
        store.save(0, state, notes | {"imported": str(source.absolute())}, {}, state_checksum(0, state).checksum)
        store.wait()


@contextmanager
def _tensors(source: Path, say: Say) -> Iterator[Tensors]:
    """The tensors of files, or of the newest checkpoint of a run."""
    if not Folder(source).recipe.is_file():
        with opened(source) as tensors:
            yield tensors
        return
    loaded = load_run(Folder(source), [], say)
    say(f"{source}: {loaded.chosen}")
    yield InMemory(values_of(loaded), record(loaded.recipe.model))


def naming(tensors: Tensors, model: object, ours: Mapping[str, Param]) -> dict[str, Place]:
    """Where each parameter is in the file: under dtrain's names or the published ones, whichever match more tensors.

    Raises DataError if the file has the published names of another architecture.
    """
    if not isinstance(model, Decoder):
        return own_names(ours)
    table = places(model)
    own = sum(name in tensors for name in ours)
    names = [f"{prefix}{place.name}" for place in table.values() for prefix in ("", PREFIX)]
    published = sum(name.format(layer=0, expert=0) in tensors for name in names)
    if own > published or (not published and ours.keys() - table.keys()):
        return own_names(ours)
    expected = "GPT-2" if table["embed"].name in EMBEDDINGS["GPT-2"] else "Llama"
    for family, names in EMBEDDINGS.items():
        if family != expected and any(name in tensors for name in names):
            message = f"the file has the parameter names of {family}; the recipe's model has those of {expected}"
            raise DataError(message, f"start from a recipe for a {family} model: `dtrain recipes presets`")
    return published_names(model, ours)


def read(tensors: Tensors, model: object, declared: Tree, shapes: Tree, source: Path) -> Tree:
    """Read the parameters, under dtrain's names or the published ones, onto the devices with their shardings."""
    ours = unpadded(declared)
    table = naming(tensors, model, ours)
    prefix = PREFIX if f"{PREFIX}wte.weight" in tensors else ""
    expected = {
        f"{prefix}{tensor}": table[name].shape(param)
        for name, param in ours.items()
        for tensor in table[name].names(param)
    }
    # files of a model with tied embeddings may contain the head as well: then it must equal the embedding
    tied_head = {HEAD} if HEAD in tensors and HEAD not in expected and "embed" in table else set()
    _refuse_unlike(tensors, expected, tied_head, source)
    if tied_head and not np.array_equal(tensors[HEAD], tensors[f"{prefix}{table['embed'].name}"]):
        raise DataError(
            f"{source}: {HEAD} differs from the embedding, but the recipe has model.tied: true", "set model.tied: false"
        )

    def leaf(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        place, param = table[name], ours[name]
        parts = [place.read(tensors[f"{prefix}{tensor}"], param) for tensor in place.names(param)]
        values = np.stack(parts).reshape(param.shape).astype(like.dtype)
        values = np.pad(values, [(0, whole - part) for whole, part in zip(like.shape, param.shape, strict=True)])
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index])

    return jax.tree.map(leaf, paths(declared), shapes)


def _refuse_unlike(tensors: Tensors, expected: Mapping[str, tuple[int, ...]], known: set[str], source: Path) -> None:
    problems = [
        *(f"{name} is missing" for name in expected if name not in tensors),
        *(
            f"{name} is not a parameter of the model"
            for name in tensors
            if name not in expected.keys() | known and not UNUSED.search(name)
        ),
        *(
            f"{name} has shape {tensors.shape(name)}, in the model {shape}"
            for name, shape in expected.items()
            if name in tensors and tensors.shape(name) != shape
        ),
    ]
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        head = f"{source} does not match this recipe's model:"
        hint = "compare the recipe's sizes with the file's"
        if not any(name in tensors for name in expected):
            head = f"{source} is of another model: none of its {len(list(tensors))} tensors has a name of the recipe's:"
            hint = "compare the recipe's model with the model that the file was exported from"
        raise DataError("\n  ".join([head, *problems[:SHOWN], *more]), hint)


def own_names(declared: Mapping[str, Param]) -> dict[str, Place]:
    return {name: Whole(name) for name in declared}


def published_names(model: Any, declared: Mapping[str, Param]) -> dict[str, Place]:
    table = places(model) if isinstance(model, Decoder) else {}
    nameless = [name for name in declared if name not in table]
    if nameless:
        message = f"parameter {nameless[0]} has no published name"
        raise RecipeError(message if table else f"{message}: models of kind {model.kind} have only dtrain's own names")
    return table


def unpadded(declared: Tree) -> dict[str, Param]:
    """The parameters by path, without the padding that files do not have."""
    return {
        name: dataclasses.replace(param, shape=param.unpadded or param.shape)
        for name, param in by_path(declared).items()
    }


def values_of(loaded: LoadedRun) -> dict[str, jax.Array]:
    """The trained values by path, without padding."""
    shapes, values = unpadded(loaded.assembly.layout.declared), by_path(loaded.params)
    slices = {name: tuple(slice(size) for size in param.shape) for name, param in shapes.items()}
    return {name: value if value.shape == shapes[name].shape else value[slices[name]] for name, value in values.items()}


def by_path(tree: Tree) -> dict[str, Any]:
    return dict(zip(jax.tree.leaves(paths(tree)), jax.tree.leaves(tree), strict=True))
