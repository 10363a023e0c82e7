"""Parameters into a run and out of one, by safetensors files, under our names or the published ones."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtrain.checkpoint.store import Store
from dtrain.checkpoint.tensors import PICKLES, InMemory, Tensors, opened, write
from dtrain.core.errors import DataError, DtrainError, RecipeError
from dtrain.core.lease import Lease, leased
from dtrain.core.run_dir import Folder, folder, overwrite, saved_steps
from dtrain.data.batch import Example
from dtrain.data.source import UNKNOWN, Arrays
from dtrain.models.agreement import CONFIG, agree, record
from dtrain.models.decoder import Decoder
from dtrain.models.hf_export import config_of
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
PREFIX = "transformer."
"""That GPT-2's names have in some files."""
EMBEDDINGS = {"GPT-2": ("wte.weight", f"{PREFIX}wte.weight"), "Llama": ("model.embed_tokens.weight",)}
"""The embedding's name in the files of the two families of published names."""
SUFFIX = ".safetensors"
FORMATS = {".gguf", ".h5", ".msgpack", ".onnx"}
"""Suffixes of other formats, which no folder is meant to have."""
Say = Callable[[str], None]


def import_params(recipe: Recipe, runs: Path, source: Path, say: Say, *, allow_changes: bool = False) -> Folder:
    """A run whose step 0 has the parameters of a file, a folder of files, or another run; `dtrain run` trains it.

    RecipeError where the run has steps already; DataError where the tensors, or the settings recorded beside
    them, are not the model's. `allow_changes` reports other settings and imports all the same.
    """
    place = folder(runs, recipe.name)
    _refuse_steps(place)
    example = recipe.data.example() or recipe.data.open("train").example
    assembly = assemble(recipe, jax.devices(), example, recipe.steps or 2**31)
    before = place.path.is_dir()
    place.prepare()
    with leased(place.lease, say) as lease:
        _refuse_steps(place)  # again: a run may have saved one meanwhile, and from here on none can
        try:
            with _tensors(source, say) as tensors:
                table = naming(tensors, recipe.model, _unpadded(assembly.layout.declared))
                theirs = not any(isinstance(where, Whole) for where in table.values())
                agree(recipe.model, tensors.metadata, source, say, published=theirs, allowed=allow_changes)
                params = read(tensors, recipe.model, assembly.layout.declared, assembly.shapes.params, source)
        except DtrainError:
            if not before:
                shutil.rmtree(place.path, ignore_errors=True)
            raise
        _save(assembly, params, example, place, lease, source)
    return place


def _refuse_steps(place: Folder) -> None:
    if saved_steps(place.checkpoints):
        raise RecipeError(f"{place.path} has saved steps already", "give this run another name: name=...")


def _save(assembly: Assembly, params: Tree, example: Example, place: Folder, lease: Lease, source: Path) -> None:
    """The parameters as step 0 of the run."""
    recipe, state = assembly.recipe, create_state(assembly.make, assembly.shapes, params)
    with Store(place.checkpoints.absolute(), recipe.checkpoint, holds=lease.holds) as store:
        overwrite(place.recipe, text(recipe))
        data = Arrays({}, example, UNKNOWN)
        notes = about(conditions(assembly), recipe, data, 0, 0, eval_pending=False, seen=Start().seen, step_s=0.0)
        store.save(0, state, notes | {"imported": str(source.absolute())}, {}, state_checksum(0, state).checksum)
        store.wait()


@contextmanager
def _tensors(source: Path, say: Say) -> Iterator[Tensors]:
    """Those of files, or the newest parameters of a run."""
    if not Folder(source).recipe.is_file():
        with opened(source) as tensors:
            yield tensors
        return
    found = load_run(Folder(source), [], say)
    say(f"{source}: {found.chosen}")
    yield InMemory(_values(found), record(found.recipe.model))


def target(path: Path) -> Path:
    """The file to write: the path itself, or in a folder model.safetensors. RecipeError where it is neither."""
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    if path.suffix in PICKLES | FORMATS and not path.is_dir():
        raise RecipeError(f"{path}: export writes {SUFFIX} files", f"name it {path.with_suffix(SUFFIX)}, or a folder")
    return path / f"model{SUFFIX}"  # the folder is made when there is something to write


def export_params(found: LoadedRun, path: Path, published: bool) -> None:
    """Write the parameters, whole, to one file. RecipeError where the model has no published names."""
    declared, values = _unpadded(found.assembly.layout.declared), _values(found)
    table = _published(found.recipe.model, declared) if published else _own(declared)
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
    about = {"dtrain": f"{found.recipe.name} at step {found.step}"}
    write(path, side_by_side, about | record(found.recipe.model))


def write_config(model: Any, place: Path) -> str:
    """A config.json in the folder, for libraries that read it, and what came of it in a sentence."""
    path, config = place / CONFIG, config_of(model)
    if config is None:
        return f"no {path}: no architecture of Hugging Face's that dtrain serves computes what this model does"
    if path.exists():
        return f"{path} was there before and is left as it is"
    overwrite(path, json.dumps(config, indent=2) + "\n")
    return f"{path}: {config['model_type']}; a tokenizer is not written"


def naming(tensors: Tensors, model: Any, ours: Mapping[str, Param]) -> dict[str, Place]:
    """Where each parameter is in the file: under our names, or where more of them are there, the published ones.

    DataError where it is the file of a model with other published names.
    """
    if not isinstance(model, Decoder):
        return _own(ours)
    table = places(model)
    own = sum(name in tensors for name in ours)
    names = [f"{prefix}{place.name}" for place in table.values() for prefix in ("", PREFIX)]
    theirs = sum(name.format(layer=0, expert=0) in tensors for name in names)
    if own > theirs or (not theirs and ours.keys() - table.keys()):
        return _own(ours)
    wanted = "GPT-2" if table["embed"].name in EMBEDDINGS["GPT-2"] else "Llama"
    for family, names in EMBEDDINGS.items():
        if family != wanted and any(name in tensors for name in names):
            message = f"the file has the names of {family}'s architecture; the recipe's model has those of {wanted}'s"
            raise DataError(message, f"begin with the preset of a {family} model: `dtrain recipes presets`")
    return _published(model, ours)


def read(tensors: Tensors, model: Any, declared: Tree, shapes: Tree, source: Path) -> Tree:
    """The parameters in their places, from our names or the published ones."""
    ours = _unpadded(declared)
    table = naming(tensors, model, ours)
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
        values = np.pad(values, [(0, whole - part) for whole, part in zip(like.shape, param.shape, strict=True)])
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index])

    return jax.tree.map(leaf, paths(declared), shapes)


def _refuse_unlike(tensors: Tensors, wanted: Mapping[str, tuple[int, ...]], known: set[str], source: Path) -> None:
    problems = [
        *(f"{name} is missing" for name in wanted if name not in tensors),
        *(
            f"{name} is no parameter of the model"
            for name in tensors
            if name not in wanted.keys() | known and not UNUSED.search(name)
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
        hint = "compare the recipe's sizes with the file's"
        if not any(name in tensors for name in wanted):
            head = f"{source} holds another model: none of its {len(list(tensors))} tensors has a name of the recipe's:"
            hint = "compare the recipe's model with the one that the file was made from"
        raise DataError("\n  ".join([head, *problems[:SHOWN], *more]), hint)


def _own(declared: Mapping[str, Param]) -> dict[str, Place]:
    return {name: Whole(name) for name in declared}


def _published(model: Any, declared: Mapping[str, Param]) -> dict[str, Place]:
    table = places(model) if isinstance(model, Decoder) else {}
    nameless = [name for name in declared if name not in table]
    if nameless:
        message = f"parameter {nameless[0]} has no published name"
        raise RecipeError(f"{message}: models of kind {model.kind} go by dtrain's own names" if not table else message)
    return table


def _unpadded(declared: Tree) -> dict[str, Param]:
    """The parameters by their paths, without padding: no file has it."""
    return {
        name: dataclasses.replace(param, shape=param.unpadded or param.shape)
        for name, param in _by_path(declared).items()
    }


def _values(found: LoadedRun) -> dict[str, jax.Array]:
    """The trained values by their paths, without padding."""
    shapes, values = _unpadded(found.assembly.layout.declared), _by_path(found.params)
    cut = {name: tuple(slice(size) for size in param.shape) for name, param in shapes.items()}
    return {name: value if value.shape == shapes[name].shape else value[cut[name]] for name, value in values.items()}


def _by_path(tree: Tree) -> dict[str, Any]:
    return dict(zip(jax.tree.leaves(paths(tree)), jax.tree.leaves(tree), strict=True))
