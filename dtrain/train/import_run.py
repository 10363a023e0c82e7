"""Make a run from parameters: of safetensors files or of another run, of a published folder, of PEFT adapters."""

import dataclasses
import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from dtrain.assembly.assemble import Assembly, assemble
from dtrain.assembly.checksum import state_checksum
from dtrain.assembly.state import create_state, saved
from dtrain.checkpoint.store import Store
from dtrain.checkpoint.tensors import InMemory, Tensors, opened
from dtrain.core.errors import RecipeError
from dtrain.core.files import overwrite, read_object
from dtrain.core.lease import Lease, hold_lease
from dtrain.core.run_dir import Folder, folder, saved_steps
from dtrain.core.types import JsonObject
from dtrain.data.arrays import Arrays
from dtrain.data.batch import Example
from dtrain.data.source import UNKNOWN
from dtrain.data.tokenizer import open_tokenizer
from dtrain.data.tokenizer_files import copy_tokenizer
from dtrain.models.agreement import CONFIG, agree, described, record
from dtrain.models.decoder import Decoder
from dtrain.models.families.fields import Published
from dtrain.models.layer_pattern import OTHER_MIXERS
from dtrain.models.lora import ADAPTERS, BASE
from dtrain.models.nn.param import count
from dtrain.recipe.load import given_part, lasting_text, load, plain
from dtrain.recipe.recipe import UNKNOWN_STEPS, Init, Recipe
from dtrain.recipe.sizes import with_sizes
from dtrain.recipe.yaml import dump
from dtrain.train.provenance import conditions, conditions_of
from dtrain.train.resume import Start
from dtrain.weights.card import base_kind, record_base
from dtrain.weights.checkpoint_choice import refuse_no_run
from dtrain.weights.initial import Origin, compare_pictures, initial_from
from dtrain.weights.load import load_run, values_of
from dtrain.weights.peft import adapted_names, read_adapter, read_config
from dtrain.weights.read import (
    base_names,
    find_tensors,
    is_published,
    leaves_by_path,
    read,
    tensor_names,
    without_padding,
)

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
    if frozen := recipe.minimised.sources():
        hint = "start the run from them instead: init.weights=FOLDER or init.run=RUN, and dtrain run"
        message = f"a {recipe.minimised.kind} takes the parameters of its {min(frozen)} when it runs"
        raise RecipeError(f"objective: {message}", hint)
    run_dir, recipe = folder(runs, recipe.name), with_sizes(recipe)
    _refuse_steps(run_dir)
    example = recipe.data.example() or recipe.data.open("train").example
    assembly = assemble(recipe, jax.devices(), example, recipe.steps or UNKNOWN_STEPS)
    with new_run(run_dir, say) as lease:
        ours, shapes = without_padding(assembly.layout.declared), leaves_by_path(assembly.shapes.params)
        with _tensors(source, say) as tensors:
            published = is_published(tensor_names(tensors, recipe.model, ours))
            agree(recipe.model, tensors.metadata, source, say, published=published, allowed=allow_changes)
            where = find_tensors(tensors, recipe.model, ours, source, say=say)
            params = read(tensors, where, ours, shapes)
        if published:
            compare_pictures(source, recipe.data.main.pictures, example, say)
        before(run_dir)
        save_first(assembly, params, example, run_dir, lease, {"imported": str(source.absolute())})
    return run_dir


def _refuse_steps(run_dir: Folder) -> None:
    if saved_steps(run_dir.checkpoints):
        raise RecipeError(f"{run_dir.path} already has saved steps", "give this run another name")


@contextmanager
def new_run(run_dir: Folder, say: Say) -> Iterator[Lease]:
    """Lock the folder of a new run; if the block fails or is interrupted, a folder that did not exist is deleted.

    RecipeError if the run has saved steps already.
    """
    _refuse_steps(run_dir)
    before = run_dir.path.is_dir()
    run_dir.prepare()
    try:
        with hold_lease(run_dir.lease, say) as lease:
            _refuse_steps(run_dir)  # again: a run may have saved a step before the lock was taken
            yield lease
    except BaseException:
        if not before:
            shutil.rmtree(run_dir.path, ignore_errors=True)
        raise


def save_first(
    assembly: Assembly,
    given: Mapping[str, jax.Array],
    example: Example,
    run_dir: Folder,
    lease: Lease,
    notes: JsonObject,
) -> None:
    """Save a state with the given parameters, by path, as step 0 of the run, with notes for its manifest."""
    recipe, state = assembly.recipe, create_state(assembly.make, assembly.shapes, given)
    with Store(run_dir.checkpoints.absolute(), recipe.checkpoint, holds=lease.check) as store:
        overwrite(run_dir.recipe, lasting_text(recipe))
        data = Arrays({}, example, UNKNOWN)
        hooks_state = {"guard_state": Start().guard_state, "progress": {}}
        now = conditions_of(
            conditions(assembly), recipe, data, 0, 0, eval_pending=False, hooks_state=hooks_state, step_s=0.0
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


def import_adapters(
    source: Path, name: str, base: Path, overrides: Sequence[str], devices: int | None, runs: Path, say: Say
) -> Folder:
    """Create the run `name`, whose step 0 has the adapters of the folder, with the run `base` as its frozen base.

    DataError if they are not plain LoRA adapters for the base; nothing is left behind then.
    """
    refuse_no_run(Folder(base))
    values, config = plain(load(Folder(base).recipe)), read_config(source)
    if values.get("lora"):
        raise RecipeError(f"{base} has adapters itself", "name the run that has the parameters of the model")
    original = load(Folder(base).recipe)
    declared = without_padding(original.model.params())
    table = base_names(original.model, declared, base_kind(Folder(base)))
    places = {name: (table[name], declared[name]) for name in declared}
    with opened(source) as tensors:
        names = adapted_names(tensors, places, source)
        values |= {"init": {"run": str(base)}}
        values["lora"] = {"rank": config["r"], "alpha": float(config["lora_alpha"]), "targets": names}
        recipe = _recipe(values, name, overrides, devices)
        example = recipe.data.example()
        assert example is not None, "only decoders have published names, and their data has known shapes"
        assembly = assemble(recipe, jax.devices(), example, recipe.steps or UNKNOWN_STEPS)
        shapes = leaves_by_path(assembly.shapes.params)
        given: dict[str, Any] = {}
        for path in names:
            keys = {part: f"{ADAPTERS}.{path}.{part}" for part in ("a", "b")}
            pair = read_adapter(tensors, *places[path], {part: shapes[key].shape for part, key in keys.items()})
            given |= {key: _placed(pair[part], shapes[key]) for part, key in keys.items()}
    initial = initial_from(assembly, Origin(Init(run=str(base))), say)
    frozen = initial.read()
    run_dir = folder(runs, name)
    notes = {"imported": str(source.absolute()), BASE: initial.record(frozen)}
    given |= frozen
    with new_run(run_dir, say) as lease:
        save_first(assembly, given, example, run_dir, lease, notes)
    return run_dir


def _recipe(values: JsonObject, name: str, overrides: Sequence[str], devices: int | None) -> Recipe:
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / f"{name}.yaml"
        path.write_text(dump(values | {"name": name}))
        return load(path, overrides, devices)


def _placed(values: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index].astype(like.dtype))


TOKENIZER = "tokenizer"
"""The folder in the run folder that holds the files of the tokenizer."""
LENGTH = 1024
"""Most tokens per row of the recipes that are written; a user may set more."""
LARGE = 300_000_000
"""Parameters from which on the layers of the written recipe save only their inputs for the backward pass."""
WORDS = 16_384
"""Most words of the vocabulary whose logits are computed at once in the written recipe."""

CHAT = "chat.jsonl"
"""The file that a written recipe names if none is given."""
TUNE = """\
# Tune {name} with low-rank adapters on conversations:  dtrain run {file}
#
# {data}: JSON lines with `messages`, with `prompt` and `response`, or with `instruction` and `output`.
# See them as the model does before the run:  dtrain data show {file}
{model}init: {{{origin}}}
lora:
  rank: 16
  alpha: 32
  targets: [{targets}]
{dtype}data:
  kind: chat
  files: [{files}]
  length: {length}
  tokenizer: {tokenizer}
{template}optimizer:
  kind: adamw
  lr: 2e-4
  clip: 1.0
  schedule: {{kind: cosine, final: 0.1}}
precision: {{compute: bfloat16}}
batch: 8
epochs: 2
track: {{every: 10}}
"""


HALF = "  dtype: bfloat16 # of what is frozen, as it was published: half the memory; nf4: an eighth\n"


def import_published(
    source: Path,
    name: str,
    overrides: Sequence[str],
    devices: int | None,
    runs: Path,
    say: Say,
    *,
    recipe_only: bool = False,
    tokenizer_folder: Path | None = None,
    data: Path | None = None,
    out: Path | None = None,
) -> Path:
    """Create the run `name` with the parameters of the folder at step 0, and NAME-tune.yaml, a recipe that tunes it.

    With `recipe_only`, only that recipe is written, and it reads the folder itself. The tokenizer comes from
    `tokenizer_folder`, by default from `source`. `data`: the conversations that the recipe names; `out`: its file,
    in place of NAME-tune.yaml. Returns the recipe's path; one that exists already is not changed.
    DataError if the folder's model is not supported or its files do not fit together; nothing is left behind then.
    """
    published = described(source)
    if not published.model.generates:
        message = f"{source} has the weights of a classifier of images"
        raise RecipeError(
            message, f"train them on your pictures: dtrain new PHOTOS --weights {shlex.quote(str(source))}"
        )
    if published.unchecked:
        say(f"{source / CONFIG} has fields that dtrain does not recognise: {', '.join(published.unchecked)}")
    run_dir = folder(runs, name)
    place = tokenizer_folder or source
    tokenizer = tokenizer_in(place)
    if tokenizer:
        _report_tokenizer(tokenizer, published.model, say)
    elif tokenizer_folder:
        raise RecipeError(f"--tokenizer: {place} has no tokenizer.json and no tokenizer.model")
    else:
        say(f"{source} has no tokenizer.json and no tokenizer.model")
    if recipe_only:
        if overrides:
            raise RecipeError(f"--recipe-only takes no overrides, found {overrides[0]}", "give them to dtrain run")
        path = out or Path(f"{name}-tune.yaml")
        if path.exists():
            raise RecipeError(f"{path} exists already", "give another name: --out NAME")
        return _written(path, name, f"weights: {source}", source, published, str(place), tokenizer is not None, data)
    own = str(run_dir.path / TOKENIZER)  # without a file there, what needs a tokenizer is refused
    values: JsonObject = {
        "model": given_part(published.model),
        "data": {"kind": "chat", "files": [], "length": min(LENGTH, published.model.context), "tokenizer": own},
        "optimizer": {"kind": "adafactor", "lr": 1e-4},  # has hardly any state
        "batch": 8,
        "steps": 1,
    }
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / f"{name}.yaml"
        path.write_text(dump(values))
        recipe = dataclasses.replace(load(path, overrides, devices), name=name)

    def beside(run_dir: Folder) -> None:
        copy_tokenizer(place, run_dir.path / TOKENIZER)
        record_base(run_dir.path, source)

    import_params(recipe, runs, source, say, before=beside)
    path = Path(f"{name}-tune.yaml")
    return _written(path, name, f"run: {run_dir.path}", source, published, own, tokenizer is not None)


def tokenizer_in(folder: Path) -> Path | None:
    """The file of the tokenizer in a folder."""
    names = ("tokenizer.json", "tokenizer.model")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _report_tokenizer(path: Path, model: Decoder, say: Say) -> None:
    size = open_tokenizer(str(path)).size
    if size > model.vocab:
        say(
            f"{path} has token ids up to {size - 1:,}, the model's vocab is {model.vocab:,}: data with these is refused"
        )


def _dtype(source: Path) -> str:
    """The dtype of published parameters, as their config.json says; empty if it does not."""
    config = read_object(source / CONFIG)
    return str(config.get("dtype") or config.get("torch_dtype") or "")


ATTENTION = ("query", "key", "value", "out")


def _written(
    path: Path,
    name: str,
    origin: str,
    source: Path,
    published: Published,
    tokenizer: str,
    found: bool,
    data: Path | None = None,
) -> Path:
    model = published.model
    if path.exists():
        return path
    section, words = given_part(model), model.padded_vocab
    if count(model.params()) > LARGE:
        section["remat"] = "full"
        chunks = (n for n in range(1, words + 1) if words % n == 0 and words // n <= WORDS)
        section["loss_chunks"] = next(chunks)
    layer = "blocks.*." if model.stacks else "blocks."
    matrices = ("query.weight", "latent.*", "out.weight") if model.latent else [f"{name}.weight" for name in ATTENTION]
    attends = any(model.mixer(kind) is None for kind in model.kinds)
    targets = [f"{layer}{name}" for name in matrices] if attends else []
    targets += [f"{layer}{name}.*" for name in OTHER_MIXERS if getattr(model, name)]
    targets += [] if model.experts else [f"{layer}mlp.*"]
    template = "  # template: chatml  # if the tokenizer has none of its own\n"
    if found:
        has_template = open_tokenizer(tokenizer).template is not None
        template = "" if has_template else "  template: alpaca  # the tokenizer has none of its own\n"
    text = TUNE.format(
        name=name,
        data=data or CHAT,
        files=json.dumps(str(data or CHAT), ensure_ascii=False),
        file=path,
        model=dump({"model": section}),
        origin=origin,
        targets=", ".join(f'"{target}"' for target in targets),
        dtype=HALF if _dtype(source) == "bfloat16" else "",
        length=min(LENGTH, model.context),
        tokenizer=tokenizer if found else "FOLDER  # the weights came without one: name a folder with a tokenizer.json",
        template=template,
    )
    try:
        overwrite(path, text)
    except OSError as error:
        raise RecipeError(f"cannot write {path}: {error.strerror}") from error
    return path
