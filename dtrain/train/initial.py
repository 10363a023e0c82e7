"""Parameters that come from another run or from files (`init`, `objective.teacher`), read by path onto the mesh."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax

from dtrain.checkpoint.partial import read_arrays, saved_shapes
from dtrain.checkpoint.store import Store
from dtrain.core.errors import CheckpointError, RecipeError
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject
from dtrain.models.distillation import TEACHER
from dtrain.models.lora import BASE
from dtrain.models.nn.patterns import matched
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Init
from dtrain.train.assembly import Assembly
from dtrain.train.choose import choose, refuse_no_run
from dtrain.train.initial_weights import weights_from
from dtrain.train.weights import by_path, part_of

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
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    """The shapes of all parameters here, with their shardings."""
    lines: Sequence[str]
    """What a user should know: the parameters that do not come from there, and those that are not used."""
    checksum: tuple[int, ...]
    """Of the checkpoint."""

    def read(self) -> dict[str, jax.Array]:
        wanted = {key: self.shapes[name] for name, key in self.keys.items()}
        values = read_arrays(self.checkpoints, self.step, wanted)
        return {name: values[key] for name, key in self.keys.items()}

    def record(self, given: Mapping[str, jax.Array]) -> JsonObject:
        return {"run": str(self.checkpoints.parent), "step": self.step, "checksum": list(self.checksum)}


def initial_from(
    assembly: Assembly, init: Init, warn: Callable[[str], None], checksum: Sequence[int] = (), part: str = ""
) -> Initial:
    """Find the parameters that this run takes from another run or from files.

    `part`: the part of the tree that they are for, such as the teacher's. `checksum`: of the values that this run was
    started from, in another start. RecipeError or DataError if there is no such run or file, or if it does not fit.
    """
    part = part or (BASE if assembly.recipe.lora else "")
    if init.weights:
        return weights_from(assembly, init, warn, checksum, part)
    return _from_run(assembly, init, warn, checksum, part)


def _from_run(
    assembly: Assembly, init: Init, warn: Callable[[str], None], checksum: Sequence[int], part: str
) -> InitialRun:
    """Choose and check the other run's checkpoint, and find the parameters that this run takes from it.

    The averaged parameters are taken if the other run kept an average. A parameter that the checkpoint lacks, or has in
    another shape, is left out. RecipeError if there is no such run, if a pattern matches nothing, or if no parameter
    fits.
    """
    place = Folder(Path(init.run))
    if checksum and not place.recipe.exists():
        message = f"{init.run} is not there; the frozen parameters of this run come from it"
        raise CheckpointError(message, "restore that folder")
    refuse_no_run(place)
    recipe, number = load(place.recipe), init.step if isinstance(init.step, int) else None
    if recipe.lora:
        hint = f"join its adapters with its base first: dtrain export {init.run} FILE, then dtrain import"
        raise RecipeError(f"init.run: {init.run} has adapters alone (lora)", hint)
    folder = place.checkpoints.absolute()
    with Store(folder, recipe.checkpoint, reading=True) as store:
        checkpoint, chosen = choose(place, recipe, store, warn, step=number, best=init.step == "best")
    stored = saved_shapes(folder, checkpoint.step)
    there = _parameters(stored)
    shapes = part_of(assembly.recipe, by_path(assembly.shapes.params), part)
    sources = _sources(list(shapes), init, there, part)
    fitting = {name: key for name, key in sources.items() if stored[key] == shapes[name].shape}
    if checksum and list(checksum) != list(checkpoint.checksum):
        message = f"step {checkpoint.step} of {init.run} is not the checkpoint that this run was started from"
        raise CheckpointError(message, "restore that run, or give this one another name: name=...")
    declared = part_of(assembly.recipe, by_path(assembly.layout.declared), part)
    missing = [name for name, param in declared.items() if not param.saved and name not in fitting]
    if missing and fitting:
        name, where = _own_name(missing[0], part), "lora" if part == BASE else "objective.teacher"
        hint = f"train it in full, lora.train: [{name}], or name it in init.map" if part == BASE else ""
        raise RecipeError(f"{where}: {init.run} lacks {name} {shapes[missing[0]].shape}, which would be frozen", hint)
    if not fitting:
        raise RecipeError(f"init: no parameter of {init.run} has a name and shape of this model", _hint(there))
    what = f"{part}: " if part == TEACHER else "initialised "
    head = f"{what}from {init.run} at {chosen}: {len(fitting)} of {len(shapes)} parameters"
    lines = [head, *_differences(shapes, sources, fitting, there, stored)]
    origin = f"{place.path.absolute()} at step {checkpoint.step}"
    return InitialRun(origin, folder, checkpoint.step, fitting, shapes, lines, tuple(checkpoint.checksum))


def _parameters(stored: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The path in the saved state of each parameter; of its average if there is one."""
    own = {key.removeprefix(PARAMS): key for key in stored if key.startswith(PARAMS)}
    return own | {key.partition(AVERAGED)[2]: key for key in stored if key.startswith(OPTIMIZER) and AVERAGED in key}


def _sources(names: list[str], init: Init, there: Mapping[str, str], part: str) -> dict[str, str]:
    """The path in the saved state for each parameter here that the other run has."""
    renamed = matched(init.map, names, "init.map")
    left_out = matched(init.new, names, "init.new")
    twice = renamed.keys() & left_out.keys()
    if twice:
        raise RecipeError(f"init: {min(twice)} is both in map and in new", "leave it out of one of them")
    found = {}
    for name in names:
        other = _replaced(name, renamed[name], init.map[renamed[name]]) if name in renamed else _own_name(name, part)
        if name in renamed and other not in there:
            raise RecipeError(f"init.map: {init.run} has no parameter {other}, for {name}", _hint(there))
        if other in there and name not in left_out:
            found[name] = there[other]
    return found


def _own_name(name: str, part: str) -> str:
    """The name of a parameter in its own model, without the part of the tree that it is in."""
    return name.removeprefix(f"{part}.") if part else name


def _replaced(name: str, pattern: str, other: str) -> str:
    """`other` with each `*` replaced by what the same `*` of the pattern stands for in the name."""
    if other.count("*") != pattern.count("*"):
        message = f"init.map: {pattern!r} has {pattern.count('*')} stars and {other!r} {other.count('*')}"
        raise RecipeError(message, "give both the same number")
    found = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name)
    if found is None:
        raise RecipeError(f"init.map: {pattern!r} has more than stars", "use `*` alone for what differs")
    parts = iter(found.groups())
    return "".join(next(parts) if character == "*" else character for character in other)


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
