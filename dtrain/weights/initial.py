"""Parameters that come from another run or from files (`init`, `objective.teacher`), read by path onto the mesh."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dtrain.assembly.assemble import Assembly
from dtrain.assembly.checksum import values_checksum
from dtrain.checkpoint import manifest
from dtrain.checkpoint.partial import read_arrays, saved_shapes
from dtrain.checkpoint.store import Store
from dtrain.checkpoint.tensors import opened
from dtrain.core.errors import CheckpointError, DataError, RecipeError
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.core.types import JsonObject
from dtrain.core.weights_source import WeightsSource
from dtrain.data.batch import IMAGE, Example, Preparation
from dtrain.models.agreement import agree
from dtrain.models.distillation import TEACHER
from dtrain.models.image_configs import prepared_as, unlike
from dtrain.models.lora import BASE
from dtrain.models.nn.param import Param
from dtrain.models.nn.patterns import matched, replaced
from dtrain.models.nn.quantised import Quantised, in_full, is_quantised, quantise
from dtrain.models.parts import is_in
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Init, Recipe
from dtrain.weights.checkpoint_choice import recipe_of, refuse_no_run, select_checkpoint
from dtrain.weights.read import (
    Located,
    find_tensors,
    is_published,
    leaves_by_path,
    part_of,
    read,
    tensor_names,
    without_padding,
)


class Origin(NamedTuple):
    """Where parameters of a run come from."""

    init: Init
    checksum: tuple[int, ...] = ()
    """Of the values that an earlier start read; empty for a new run."""
    path: str = ""
    """What their paths begin with there."""


def recorded(run_dir: Folder, part: str, init: Init, path: str = "") -> Origin:
    """Where the frozen parameters of that part come from, as the run's checkpoints record it.

    `init`: where the recipe has them; used if the recorded folder is not there. CheckpointError if none records it.
    """
    for step in saved_steps(run_dir.checkpoints):
        with suppress(manifest.CorruptCheckpoint, OSError):
            about = manifest.read(run_dir.checkpoints / str(step)).conditions
            own = about.get(PARTS, {}).get(part)
            if own is None and part in (BASE, TEACHER):  # where earlier versions recorded them
                own = about.get(part)
            if own:
                return Origin(_same(own, part, init), tuple(own["checksum"]), path)
    raise CheckpointError(f"{run_dir.path} has no checkpoint that records its {part}", "start a new run: name=...")


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


def recorded_sources(recipe: Recipe, run_dir: Folder) -> dict[str, Origin]:
    """What a start of the run takes from elsewhere, by the part of its parameters; "" for all of its own.

    Everything that `init` gives before the first save; after it, only the parameters that are frozen.
    """
    found: dict[str, Origin] = {}
    init, saves = recipe.init, bool(saved_steps(run_dir.checkpoints))
    if recipe.model.needs_init and not (init or saves):
        hint = "name published parameters, init: {weights: FOLDER, new: [head.*]}, or a run of such a model"
        raise RecipeError(f"model.kind {recipe.model.kind}: {recipe.model.needs_init}", hint)
    if init and (recipe.lora or not saves):
        part = BASE if recipe.lora else ""
        found[part] = recorded(run_dir, part, init) if saves else Origin(init)
    for part, origin in recipe.minimised.sources().items():
        found[part] = recorded(run_dir, part, init_of(origin)) if saves else Origin(init_of(origin))
    for name, part in recipe.parts.items():
        if part.frozen or not saves:
            own = init_of(part)
            found[name] = recorded(run_dir, name, own, part.path) if saves else Origin(own, (), part.path)
    return found


def init_of(origin: WeightsSource) -> Init:
    """The same source as one of initial parameters."""
    return Init(run=origin.run, weights=origin.weights, step=origin.step)


PARTS = "parts"
"""Where a checkpoint's conditions record the origins of parameters that it does not save, by part."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class InitialWeights:
    """Parameters of safetensors files: those that a new run starts from, or those of its teacher."""

    source: Path
    where: Located
    ours: Mapping[str, Param]
    """The parameters that are read, by their paths in the files' model."""
    names: Mapping[str, str]
    """Their paths in this run, by those."""
    shapes: Mapping[str, jax.ShapeDtypeStruct | Quantised]
    """Their shapes and shardings."""
    replicated: jax.sharding.Sharding
    lines: Sequence[str]
    """What a user should know: how many parameters come from there, and which do not."""
    expected: Sequence[int] = ()
    """The checksum of the values that the run was started from; empty for a new run."""

    @property
    def origin(self) -> str:
        """The folder or file."""
        return str(self.source.absolute())

    def read(self) -> dict[str, jax.Array]:
        """The parameters by their paths here. CheckpointError if they are not those that the run was started from."""
        with opened(self.source) as tensors:
            values = read(tensors, self.where, self.ours, self.shapes)
        given = leaves_by_path({self.names[name]: value for name, value in values.items()})
        if self.expected and self.record(given)["checksum"] != list(self.expected):
            message = f"{self.source} does not have the parameters that this run was started from"
            raise CheckpointError(message, "restore those files, or give this run another name: name=...")
        return given

    def record(self, given: Mapping[str, jax.Array]) -> JsonObject:
        return {"weights": self.origin, "checksum": list(values_checksum(dict(given), self.replicated))}


def weights_from(assembly: Assembly, given: Origin, say: Say, part: str) -> InitialWeights:
    """Find the parameters of this run in the files of `init.weights`.

    All but those of `init.new` must be there. DataError if one is not, or if config.json describes another model.
    """
    init, checksum, path = given
    source, recipe = Path(init.weights), assembly.recipe
    if not source.exists():
        raise DataError(f"init.weights: {source} does not exist", "give a folder or a file of safetensors")
    declared, shapes = (
        part_of(recipe, leaves_by_path(tree, is_quantised), part)
        for tree in (in_full(assembly.layout.declared), assembly.shapes.params)
    )
    model = assembly.frozen.get(part, recipe.model)
    left_out = _matching(init.new, list(declared), part, "init.new")
    random = [name for name in left_out if not declared[name].saved]
    if random:
        own = random[0].removeprefix(f"{part}.")
        raise RecipeError(f"init.new: {own} would be frozen at random values", f"train it in full, lora.train: [{own}]")
    names = {_name_there(name, part, path): name for name in declared}
    sizes = without_padding(declared)
    ours = {own: sizes[name] for own, name in names.items()}
    new = [own for own, name in names.items() if name in left_out]
    with opened(source) as tensors:
        published = is_published(tensor_names(tensors, model, ours))
        if part not in recipe.parts:  # the files are of another model than the whole
            agree(model, tensors.metadata, source, say, published=published, override=False)
        where = find_tensors(tensors, model, ours, source, new, say)
    if published:
        compare_pictures(source, recipe.data.main.pictures, assembly.layout.example, say)
    taken = {own: name for own, name in names.items() if own not in new}
    what = f"{part}: " if part in (*assembly.frozen, *recipe.parts) else "initialised "
    lines = [f"{what}from {source}: {len(taken)} of {len(names)} parameters"]
    lines += _listed("initialised at random", list(new))
    return InitialWeights(
        source,
        where,
        {own: ours[own] for own in taken},
        taken,
        {own: shapes[name] for own, name in taken.items()},
        replicated=assembly.layout.sharding(PartitionSpec()),
        lines=lines,
        expected=checksum,
    )


def compare_pictures(source: Path, given: Preparation | None, example: Example, say: Callable[[str], None]) -> None:
    """Say so if the data normalises pixels in another way than the one that published parameters were trained with, or
    if their files do not tell. DataError if these are damaged."""
    if given is None or IMAGE not in example:
        return
    wanted = prepared_as(source, example[IMAGE].shape[-1])
    own = f"data.pixels has mean {list(given.mean)}, std {list(given.std)}"
    if wanted is None:
        say(f"{source} does not say how pixels were normalised: not checked; {own}")
    elif unlike(given, wanted):
        theirs = f"mean {list(wanted.mean)}, std {list(wanted.std)}"
        say(f"{source} was trained on pixels normalised with {theirs}; {own}")


SHOWN = 8
"""Parameters that a message lists."""
PARAMS, OPTIMIZER, AVERAGED = "params.", "optimizer.", ".averaged."
"""Where a saved state has the parameters, and their average: in the optimizer's state."""


class Initial(Protocol):
    """Parameters of a run, or a part of them, that come from elsewhere."""

    @property
    def origin(self) -> str:
        """Where they come from."""
        ...

    @property
    def lines(self) -> Sequence[str]:
        """What a user should know about them."""
        ...

    def read(self) -> dict[str, jax.Array]:
        """The parameters by their paths here, with the shardings of this run."""
        ...

    def record(self, given: Mapping[str, jax.Array]) -> JsonObject:
        """For the manifests of a run that does not save them: how to find the same values again."""
        ...


@dataclass(frozen=True)
class InitialRun:
    """The parameters of another run's checkpoint that fit this run."""

    origin: str
    """The run's folder and the step."""
    checkpoints: Path
    step: int
    keys: Mapping[str, str]
    """The path in the saved state of each parameter, by its path here."""
    shapes: Mapping[str, jax.ShapeDtypeStruct | Quantised]
    """The shapes of all parameters here, with their shardings."""
    lines: Sequence[str]
    """What a user should know: the parameters that do not come from there, and those that are not used."""
    checksum: tuple[int, ...]
    """Of the checkpoint."""

    def read(self) -> dict[str, jax.Array]:
        likes = {name: self.shapes[name] for name in self.keys}
        narrow = {name: like for name, like in likes.items() if isinstance(like, Quantised)}
        # the largest first, while the devices hold little else
        order = sorted(narrow, key=lambda name: math.prod(narrow[name].shape), reverse=True)
        given: dict[str, Any] = {name: self._quantised(self.keys[name], narrow[name]) for name in order}
        arrays = {self.keys[name]: like for name, like in likes.items() if not isinstance(like, Quantised)}
        values = read_arrays(self.checkpoints, self.step, arrays)
        given |= {name: values[key] for name, key in self.keys.items() if key in values}
        return leaves_by_path(given)

    def _quantised(self, key: str, like: Quantised) -> Quantised:
        """One parameter, which the devices hold in float32 until it is quantised, layer by layer."""
        full = jax.ShapeDtypeStruct(like.shape, np.float32, sharding=like.codes.sharding)
        values = read_arrays(self.checkpoints, self.step, {key: full})[key]
        out = (like.codes.sharding, like.scales.sharding)
        stacked = like.ndim > 2 and like.dim % like.ndim > 0

        def narrowed(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax.lax.map(lambda one: quantise(one, like, jnp), x) if stacked else quantise(x, like, jnp)

        codes, scales = jax.jit(narrowed, out_shardings=out)(values)
        return replace(like, codes=codes, scales=scales)

    def record(self, given: Mapping[str, jax.Array]) -> JsonObject:
        return {"run": str(self.checkpoints.parent), "step": self.step, "checksum": list(self.checksum)}


def initial_from(assembly: Assembly, given: Origin, warn: Callable[[str], None], part: str = "") -> Initial:
    """Find the parameters that this run takes from another run or from files.

    `part`: the part of the tree that they are for, such as the teacher's. RecipeError or DataError if there is no such
    run or file, or if it does not fit.
    """
    part = part or (BASE if assembly.recipe.lora else "")
    if given.init.weights:
        return weights_from(assembly, given, warn, part)
    return _from_run(assembly, given, warn, part)


def _from_run(assembly: Assembly, given: Origin, warn: Callable[[str], None], part: str) -> InitialRun:
    """Choose and check the other run's checkpoint, and find the parameters that this run takes from it.

    The averaged parameters are taken if the other run kept an average. A parameter that the checkpoint lacks, or has in
    another shape, is left out. RecipeError if there is no such run, if a pattern matches nothing, or if no parameter
    fits.
    """
    init, checksum, path = given
    run_dir = Folder(Path(init.run))
    if checksum and not run_dir.recipe.exists():
        message = f"{init.run} is not there; the frozen parameters of this run come from it"
        raise CheckpointError(message, "restore that folder")
    refuse_no_run(run_dir)
    recipe, number = load(run_dir.recipe), init.step if isinstance(init.step, int) else None
    if recipe.lora:
        folder = f"{run_dir.path.name}-whole"
        hint = f"join them with their base: dtrain export {init.run} {folder}; then init: {{weights: {folder}}}"
        raise RecipeError(f"init.run: {init.run} has adapters alone (lora)", hint)
    if init.step == "best" and not recipe.checkpoint.best:
        message = f"init.step: best: {init.run} has no checkpoint.best, so none of its checkpoints is the best"
        raise RecipeError(message, "leave it out for the newest, or give the number of a step")
    folder = run_dir.checkpoints.absolute()
    with Store(folder, recipe.checkpoint, reading=True) as store:
        checkpoint, chosen = select_checkpoint(run_dir, recipe, store, warn, step=number, best=init.step == "best")
    recipe = recipe_of(checkpoint, run_dir, recipe, warn)
    stored = saved_shapes(folder, checkpoint.step)
    there = _parameters(stored)
    shapes = part_of(assembly.recipe, leaves_by_path(assembly.shapes.params, is_quantised), part)
    sources = _sources(list(shapes), init, there, part, path)
    fitting = {name: key for name, key in sources.items() if stored[key] == shapes[name].shape}
    if checksum and list(checksum) != list(checkpoint.checksum):
        message = f"step {checkpoint.step} of {init.run} is not the checkpoint that this run was started from"
        raise CheckpointError(message, "restore that run, or give this one another name: name=...")
    declared = part_of(assembly.recipe, leaves_by_path(in_full(assembly.layout.declared), is_quantised), part)
    missing = [name for name, param in declared.items() if not param.saved and name not in fitting]
    if missing and fitting:
        where = "lora" if part == BASE else f"parts.{part}" if part in assembly.recipe.parts else f"objective.{part}"
        name = _name_there(missing[0], part, path)
        hint = f"train it in full, lora.train: [{name}], or name it in init.map" if part == BASE else ""
        raise RecipeError(f"{where}: {init.run} lacks {name} {shapes[missing[0]].shape}, which would be frozen", hint)
    from_elsewhere = [other for other, one in recipe.parts.items() if one.frozen]
    unsaved = [name for name in shapes if name not in fitting and any(is_in(other, name) for other in from_elsewhere)]
    if unsaved:
        hint = f"name it here as well: parts: {{{unsaved[0].partition('.')[0]}: ...}}"
        raise RecipeError(f"{init.run} does not save {unsaved[0]}, which came from elsewhere (its parts)", hint)
    if not fitting:
        key = f"parts.{part}" if part in assembly.recipe.parts else "init"
        raise RecipeError(f"{key}: no parameter of {init.run} has a name and shape of this model", _hint(there))
    named = (*assembly.recipe.minimised.sources(), *assembly.recipe.parts)
    what = f"{part}: " if part in named else "initialised "
    head = f"{what}from {init.run} at {chosen}: {len(fitting)} of {len(shapes)} parameters"
    lines = [head, *_differences(shapes, sources, fitting, there, stored)]
    origin = f"{run_dir.path.absolute()} at step {checkpoint.step}"
    return InitialRun(origin, folder, checkpoint.step, fitting, shapes, lines, tuple(checkpoint.checksum))


def _parameters(stored: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The path in the saved state of each parameter; of its average if there is one."""
    own = {key.removeprefix(PARAMS): key for key in stored if key.startswith(PARAMS)}
    return own | {key.partition(AVERAGED)[2]: key for key in stored if key.startswith(OPTIMIZER) and AVERAGED in key}


def _sources(names: list[str], init: Init, there: Mapping[str, str], part: str, path: str = "") -> dict[str, str]:
    """The path in the saved state for each parameter here that the other run has."""
    renamed = _matching(init.map, names, part, "init.map")
    left_out = _matching(init.new, names, part, "init.new")
    twice = renamed.keys() & left_out.keys()
    if twice:
        raise RecipeError(f"init: {min(twice)} is both in map and in new", "leave it out of one of them")
    found = {}
    for name in names:
        other = (
            replaced(_own(name, part, renamed[name]), renamed[name], init.map[renamed[name]], "init.map")
            if name in renamed
            else _name_there(name, part, path)
        )
        if name in renamed and other not in there:
            raise RecipeError(f"init.map: {init.run} has no parameter {other}, for {name}", _hint(there))
        if other in there and name not in left_out:
            found[name] = there[other]
    return found


def _matching(patterns: Iterable[str], names: Sequence[str], part: str, where: str) -> dict[str, str]:
    """The pattern that each parameter matches, by the parameter's path. Patterns are of the paths in the model itself,
    or with the part before them, such as base. with adapters."""
    found: dict[str, str] = {}
    for pattern in patterns:
        own = {_own(name, part, pattern): name for name in names}
        chosen = matched([pattern], list(own), where)
        if twice := next((own[name] for name in chosen if own[name] in found), None):
            message = f"{where}: parameter {twice} matches {found[twice]!r} and {pattern!r}"
            raise RecipeError(message, "make one of them narrower")
        found |= {own[name]: pattern for name in chosen}
    return found


def _own(name: str, part: str, pattern: str) -> str:
    """The path that the pattern is compared with."""
    return name if not part or pattern.startswith(f"{part}.") else name.removeprefix(f"{part}.")


def _name_there(name: str, part: str, path: str) -> str:
    """The name of a parameter in the model that it comes from: `path` in place of the part that it is in here."""
    own = name.removeprefix(part).removeprefix(".") if part else name
    return ".".join(filter(None, (path, own)))


def _hint(there: Mapping[str, str]) -> str:
    names = sorted(there)
    return f"it has {', '.join(names[:SHOWN])}" + (", ..." if len(names) > SHOWN else "")


def _differences(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    sources: Mapping[str, str],
    fitting: Mapping[str, str],
    there: Mapping[str, str],
    stored: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """Lines about parameters that are initialised at random, and about those of the other run that are not used."""
    unlike = {name: f"{name} {shapes[name].shape}, there {stored[key]}" for name, key in sources.items()}
    new = [unlike.get(name, f"{name} {shapes[name].shape}") for name in shapes if name not in fitting]
    unused = [name for name, key in there.items() if key not in fitting.values()]
    return _listed("initialised at random", new) + _listed("not used of the other run", unused)


def _listed(what: str, items: list[str]) -> list[str]:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return [f"{what}: {', '.join(items[:SHOWN])}{more}"] if items else []
