"""Import parameters into a run, from safetensors files with dtrain's or the published names, or from a run."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax

from dtrain.checkpoint.store import Store
from dtrain.checkpoint.tensors import InMemory, Tensors, opened
from dtrain.core.errors import RecipeError
from dtrain.core.files import overwrite
from dtrain.core.lease import Lease, hold_lease
from dtrain.core.run_dir import Folder, folder, saved_steps
from dtrain.core.types import JsonObject
from dtrain.data.batch import Example
from dtrain.data.source import UNKNOWN, Arrays
from dtrain.models.agreement import agree, record
from dtrain.models.distillation import Distillation
from dtrain.recipe.load import lasting_text
from dtrain.recipe.recipe import Recipe
from dtrain.train.assembly import Assembly, assemble
from dtrain.train.checksum import state_checksum
from dtrain.train.load import LoadedRun, load_run
from dtrain.train.provenance import about, conditions
from dtrain.train.resume import Start
from dtrain.train.state import create_state, saved
from dtrain.train.weights import by_path, is_published, located, naming, read, unpadded

SHOWN = 8
"""Differences that an error message lists."""
PREFIXES = ("", "transformer.", "language_model.")
"""Prefixes of the parameter names in some files: of GPT-2, and of decoders that have an image encoder beside them."""
EMBEDDINGS = {"GPT-2": "wte.weight", "Llama": "model.embed_tokens.weight"}
"""Name of the embedding in files of each architecture."""
Say = Callable[[str], None]


def import_params(
    recipe: Recipe,
    runs: Path,
    source: Path,
    say: Say,
    *,
    allow_changes: bool = False,
    before: Callable[[Folder], object] = lambda _: None,
) -> Folder:
    """Create a run whose step 0 has the parameters of a file, a folder of files, or another run, for `dtrain run`.

    Raises RecipeError if the run has saved steps already, DataError if the tensors, or the settings recorded with
    them, do not match the model. With `allow_changes`, other settings are only reported. `before` is called with the
    run folder before the step is saved.
    """
    if recipe.lora:
        hint = "import them into a run of a recipe without lora, and name that run in init"
        raise RecipeError("lora: a run with adapters saves no other parameters", hint)
    if isinstance(recipe.objective, Distillation):
        hint = "start the run from them instead: init.weights=FOLDER or init.run=RUN, and dtrain run"
        raise RecipeError("objective: a distillation takes the parameters of its teacher when it runs", hint)
    place = folder(runs, recipe.name)
    _refuse_steps(place)
    example = recipe.data.example() or recipe.data.open("train").example
    assembly = assemble(recipe, jax.devices(), example, recipe.steps or 2**31)
    with new_run(place, say) as lease:
        ours, shapes = unpadded(assembly.layout.declared), by_path(assembly.shapes.params)
        with _tensors(source, say) as tensors:
            published = is_published(naming(tensors, recipe.model, ours))
            agree(recipe.model, tensors.metadata, source, say, published=published, allowed=allow_changes)
            where = located(tensors, recipe.model, ours, source)
            params = read(tensors, where, ours, shapes)
        before(place)
        save_first(assembly, params, example, place, lease, {"imported": str(source.absolute())})
    return place


def _refuse_steps(place: Folder) -> None:
    if saved_steps(place.checkpoints):
        raise RecipeError(f"{place.path} already has saved steps", "give this run another name")


@contextmanager
def new_run(place: Folder, say: Say) -> Iterator[Lease]:
    """Lock the folder of a new run; if the block fails or is interrupted, a folder that did not exist is deleted.

    RecipeError if the run has saved steps already.
    """
    _refuse_steps(place)
    before = place.path.is_dir()
    place.prepare()
    try:
        with hold_lease(place.lease, say) as lease:
            _refuse_steps(place)  # again: a run may have saved a step before the lock was taken
            yield lease
    except BaseException:
        if not before:
            shutil.rmtree(place.path, ignore_errors=True)
        raise


def save_first(
    assembly: Assembly,
    given: Mapping[str, jax.Array],
    example: Example,
    place: Folder,
    lease: Lease,
    notes: JsonObject,
) -> None:
    """Save a state with the given parameters, by path, as step 0 of the run, with notes for its manifest."""
    recipe, state = assembly.recipe, create_state(assembly.make, assembly.shapes, given)
    with Store(place.checkpoints.absolute(), recipe.checkpoint, holds=lease.check) as store:
        overwrite(place.recipe, lasting_text(recipe))
        data = Arrays({}, example, UNKNOWN)
        now = about(
            conditions(assembly), recipe, data, 0, 0, eval_pending=False, guard_state=Start().guard_state, step_s=0.0
        )
        part = saved(state, assembly.layout.declared)
        store.save(0, part, now | notes, {}, state_checksum(0, state).checksum)
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


def values_of(loaded: LoadedRun) -> dict[str, jax.Array]:
    """The trained values by path, without padding."""
    shapes, values = unpadded(loaded.assembly.layout.declared), by_path(loaded.params)
    slices = {name: tuple(slice(size) for size in param.shape) for name, param in shapes.items()}
    return {name: value if value.shape == shapes[name].shape else value[slices[name]] for name, value in values.items()}
