"""Some steps of training from given parameters, kept with the gradients, and how two of them differ."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtrain.assembly.assemble import Assembly, assemble, one_step_per_call
from dtrain.assembly.frozen import frozen_models
from dtrain.assembly.input import host_batches, train_batches
from dtrain.assembly.state import State, create_state
from dtrain.assembly.step import GRADIENTS
from dtrain.core.errors import DataError, RecipeError
from dtrain.core.run_dir import Folder
from dtrain.core.types import Device, JsonObject
from dtrain.data.source import Source
from dtrain.models.nn.param import paths
from dtrain.parallel.engine import Put
from dtrain.parallel.jit import Jit
from dtrain.parallel.mesh import Mesh
from dtrain.recipe.load import plain
from dtrain.recipe.recipe import Recipe
from dtrain.train.record import versions
from dtrain.weights.initial import initial_from, recorded_sources

NO_RUN = Folder(Path(os.devnull))
"""A folder without checkpoints: a new run's."""
TINY = 1e-6
"""A norm that is smaller than this part of the norm of all gradients counts as so large."""

Values = dict[str, np.ndarray]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trajectory:
    """What some steps of training give: the loss of each, and by path arrays of the parameters."""

    losses: np.ndarray
    gradients: Values
    """Of the mean loss of the first step."""
    before: Values
    after: Values
    stacks: frozenset[str]
    """The paths of those that have a layer in each row."""


@dataclass(frozen=True)
class Differences:
    """Relative differences by name: of losses by their steps, of gradients and parameters by their paths."""

    loss: dict[str, float]
    gradients: dict[str, float]
    parameters: dict[str, float]


def compare(expected: Trajectory, found: Trajectory) -> Differences:
    """Differences by their norm: of a gradient relative to its own, of a parameter to how far it has moved."""
    steps = enumerate(zip(expected.losses.tolist(), found.losses.tolist(), strict=True), 1)
    losses = {f"step {number}": abs(b - a) / max(abs(a), 1e-12) for number, (a, b) in steps}
    gradients, others, before, after, ends = (
        _by_layer(values, expected.stacks)
        for values in (expected.gradients, found.gradients, expected.before, expected.after, found.after)
    )
    least = TINY * float(np.linalg.norm([np.linalg.norm(value) for value in gradients.values()]))
    return Differences(
        losses,
        {name: _relative(others[name], value, max(_norm(value), least)) for name, value in gradients.items()},
        {
            name: _relative(ends[name], value, max(_norm(value - before[name]), TINY * _norm(value)))
            for name, value in after.items()
        },
    )


def _relative(found: np.ndarray, expected: np.ndarray, size: float) -> float:
    return _norm(found - expected) / max(size, 1e-30)


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))


@dataclass(frozen=True)
class Reference:
    """The training on one device that others are compared with, here or from a file that was written elsewhere."""

    recipe: JsonObject
    versions: Mapping[str, str]
    device: str
    expected: Trajectory
    noise: "Differences"
    """What another order of the examples changes on that device."""

    @property
    def steps(self) -> int:
        return len(self.expected.losses)

    def save(self, path: Path) -> None:
        """Write a .npz file with all arrays."""
        about = {name: getattr(self, name) for name in ("recipe", "versions", "device")}
        about |= {"noise": asdict(self.noise), "stacks": sorted(self.expected.stacks)}
        arrays = {f"{kind} {name}": value for kind in ARRAYS for name, value in getattr(self.expected, kind).items()}
        with path.open("wb") as file:
            np.savez(file, about=json.dumps(about), losses=self.expected.losses, **arrays)


ARRAYS = ("gradients", "before", "after")


def read_reference(path: Path) -> Reference:
    """Read what `Reference.save` wrote. DataError if the file is not one."""
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            kinds = {kind: {} for kind in ARRAYS}
            for name in file.files:
                kind, _, own = name.partition(" ")
                if own:
                    kinds[kind][own] = file[name]
            expected = Trajectory(file["losses"], **kinds, stacks=frozenset(about.pop("stacks")))
        return Reference(expected=expected, noise=Differences(**about.pop("noise")), **about)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no file of `agree --save`"
        raise DataError(f"{path}: {why}") from error


def reference_of(recipe: Recipe, steps: int, say: Say) -> Reference:
    """Train so many steps on one device, with the examples of a batch in order, and in reverse."""
    devices, source = jax.devices(), recipe.data.open("train")
    one = one_step_per_call(replace(recipe, mesh=Mesh(data=1, rules=recipe.mesh.rules), engine=Jit()))
    say("one device")
    expected = trajectory(one, devices[:1], source, steps)
    say("one device, with the examples in another order")
    noise = compare(expected, trajectory(one, devices[:1], source, steps, backwards=True))
    return Reference(plain(recipe), versions(), devices[0].device_kind, expected, noise)


def trajectory(
    recipe: Recipe,
    devices: Sequence[Device],
    source: Source,
    steps: int,
    *,
    start: Values | None = None,
    backwards: bool = False,
) -> Trajectory:
    """Train so many steps on these devices, from these parameters, by default from those of a new run.

    `backwards`: with the examples of each batch in the opposite order.

    With several steps per call, losses and parameters are those of such calls; the gradients are of one step.
    """
    total = recipe.total_steps(len(source))
    if steps > total:
        raise RecipeError(f"the run has {total} steps, fewer than {steps}", f"compare fewer: --steps {total}")
    frozen = frozen_models(recipe)
    single = assemble(one_step_per_call(recipe), devices, source.example, total, frozen)
    state = initial_state(single, start)
    declared = dict(
        zip(*(jax.tree.leaves(tree) for tree in (paths(single.layout.declared), single.layout.declared)), strict=True)
    )
    before = _of(state, declared)
    step = single.compile(single.train(gradients_too=True))
    losses: list[float] = []
    gradients: Values = {}
    for batch in _batches(single, source, steps, backwards):
        state, metrics = step(state, batch)
        found = jax.device_get(jax.block_until_ready(metrics))
        losses.append(float(found["loss"]))
        gradients = gradients or {name: np.asarray(value) for name, value in found[GRADIENTS].items()}
    if recipe.engine.steps_per_call > 1:
        losses, state = _in_calls(assemble(recipe, devices, source.example, total, frozen), source, steps, start)
    stacks = frozenset(name for name, param in declared.items() if param.dims.split()[:1] == ["layer"])
    return Trajectory(np.asarray(losses), gradients, before, _of(state, declared), stacks)


def _in_calls(assembly: Assembly, source: Source, steps: int, start: Values | None) -> tuple[list[float], State]:
    state, losses, most = initial_state(assembly, start), list[float](), assembly.recipe.engine.steps_per_call
    step = assembly.compile(assembly.train())
    calls = [range(first, min(first + most, steps)) for first in range(0, steps, most)]
    for call, batches in zip(calls, train_batches(assembly, source, 0, steps, lambda _: None, calls), strict=True):
        state, metrics = step(state, batches)
        losses += np.asarray(jax.device_get(metrics["loss"]), float)[: len(call)].tolist()
    return losses, state


def initial_state(assembly: Assembly, start: Values | None) -> State:
    """The state with these parameters, or that of a new run of the recipe."""
    given: dict[str, jax.Array] = {}
    if start is not None:
        names = jax.tree.leaves(paths(assembly.layout.declared))
        shapes = dict(zip(names, jax.tree.leaves(assembly.shapes.params), strict=True))
        here, there = ({name: tuple(value.shape) for name, value in own.items()} for own in (shapes, start))
        if other := next((name for name in [*here, *there] if here.get(name) != there.get(name)), ""):
            found = f"{here.get(other, 'missing')} here, {there.get(other, 'missing')} in the reference"
            raise RecipeError(f"the parameters are not those of the reference: {other} is {found}")
        given = {name: jax.device_put(value, shapes[name].sharding) for name, value in start.items()}
        return create_state(assembly.make, assembly.shapes, given)
    for part, origin in recorded_sources(assembly.recipe, NO_RUN).items():
        given |= initial_from(assembly, origin, lambda _: None, part).read()
    return create_state(assembly.make, assembly.shapes, given)


def _batches(assembly: Assembly, source: Source, steps: int, backwards: bool) -> Iterator[Any]:
    if not backwards:
        yield from islice(train_batches(assembly, source, 0, steps, lambda _: None), steps)
        return
    put = Put(assembly.engine, assembly.layout, assembly.recipe.batch)
    host = host_batches(assembly, source, put.held, 0, steps)
    yield from (put({name: rows[::-1] for name, rows in host[number].items()}) for number in range(steps))


def _of(state: State, names: Iterable[str]) -> Values:
    return dict(zip(names, map(np.asarray, jax.device_get(jax.tree.leaves(state.params))), strict=True))


def _by_layer(values: Values, stacks: Set[str]) -> Values:
    """The arrays by path; of a stack of layers one for each, PATH/0 and so on. In float64."""
    found: Values = {}
    for name, value in values.items():
        wide = np.asarray(value, np.float64)
        found |= {f"{name}/{layer}": part for layer, part in enumerate(wide)} if name in stacks else {name: wide}
    return found
