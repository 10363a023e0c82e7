"""Compare the training of a recipe on other meshes, with other engines and other settings, with that on one device: the
loss of each step, the gradient of each parameter, and each parameter after some steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import numpy as np

from dtrain.core.counts import counted
from dtrain.core.errors import DataError, EnvironmentFault, RecipeError
from dtrain.core.types import Device, JsonObject
from dtrain.parallel.mesh import Mesh, mesh_text
from dtrain.recipe.load import differences, plain, refuse_conflicts
from dtrain.recipe.recipe import Recipe
from dtrain.runtime.trajectory import Differences, Reference, Say, compare, trajectory
from dtrain.train.record import versions

MESHES = (
    Mesh(data=8),
    Mesh(data=1, fsdp=8),
    Mesh(data=2, fsdp=2, tensor=2),
    Mesh(data=1, fsdp=2, sequence=2, tensor=2),
    Mesh(data=2, fsdp=2, expert=2),
    Mesh(data=1, pipeline=2, fsdp=4),
)
"""The meshes that are compared unless others are given: each axis is in one of them, on eight devices."""

EXACT, ROUNDED, NARROW = 1e-4, 3e-2, 1e-1
"""Allowed difference of a gradient, relative to its norm: where all is computed in float32, where not, and where
products are in 8 bits, whose scales are those of each device's part."""
NOISE = 20.0
"""And how many times as large as that which another order of the examples makes on one device: sums of many terms, and
updates by the sign of a gradient, round more than this."""
LOSS, AFTER = 0.1, 10.0
"""The same for losses and for parameters after some steps, as a multiple of that for gradients."""


def meshes_of(recipe: Recipe) -> Sequence[Mesh]:
    """The mesh of the recipe, if it names one, and MESHES."""
    own = replace(recipe.mesh, rules={})
    return MESHES if own in (Mesh(), *MESHES) else (own, *MESHES)


@dataclass(frozen=True)
class Worst:
    """The largest difference among some values, and what is allowed for it."""

    name: str = ""
    difference: float = 0.0
    allowed: float = 0.0
    more: int = 0
    """Values beside it that differ by more than is allowed."""

    @property
    def agrees(self) -> bool:
        return self.difference <= self.allowed  # and not for NaN


@dataclass(frozen=True)
class Comparison:
    """One mesh and engine beside one device."""

    mesh: str
    engine: str
    refused: str = ""
    """Why there is no such training; then nothing else is set."""
    loss: Worst = field(default_factory=Worst)
    gradients: Worst = field(default_factory=Worst)
    parameters: Worst = field(default_factory=Worst)

    @property
    def agrees(self) -> bool:
        return not self.refused and self.loss.agrees and self.gradients.agrees and self.parameters.agrees


@dataclass(frozen=True)
class Agreement:
    """What was compared, and the results."""

    name: str
    steps: int
    batch: int
    device: str
    versions: Mapping[str, str]
    reference: JsonObject
    """The device and versions that the reference was computed with."""
    changes: Sequence[str] = ()
    """How the recipe differs from that of the reference."""
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether something was compared, and all of it agrees."""
        compared = [one for one in self.comparisons if not one.refused]
        return bool(compared) and all(one.agrees for one in compared)

    def values(self) -> JsonObject:
        """The certificate as JSON values."""
        return asdict(self) | {"agrees": self.agrees}

    def lines(self) -> Iterator[str]:
        """The certificate as lines of text."""
        steps = f"{counted(self.steps, 'step')} of {self.batch} examples"
        theirs, own = self.reference["versions"]["jax"], self.versions["jax"]
        other = f" {self.reference['device']} with jax {theirs}" if theirs != own else ""
        yield f"{self.name}: {steps} against one device{other}, on {self.device}, jax {own}"
        yield from (f"  changed: {line}" for line in self.changes)
        width = max((len(one.mesh) for one in self.comparisons), default=0)
        for one in self.comparisons:
            yield f"  {_verdict(one):<8}{one.mesh:<{width}}  {one.engine:<10}{_found(one)}"
        for one in self.comparisons:
            yield from _faults(one)


def _verdict(one: Comparison) -> str:
    return "-" if one.refused else "agrees" if one.agrees else "DIFFERS"


def _found(one: Comparison) -> str:
    if one.refused:
        return one.refused
    parts = {"loss": one.loss, "gradients": one.gradients, "parameters": one.parameters}
    return "  ".join(f"{what} {worst.difference:.1e}" for what, worst in parts.items())


def _faults(one: Comparison) -> Iterator[str]:
    """What differs, by how much, and what is allowed."""
    for what, worst in (("loss", one.loss), ("gradient", one.gradients), ("parameter", one.parameters)):
        if not one.refused and not worst.agrees:
            where = f"{what} of {worst.name}" if what != "parameter" else f"parameter {worst.name}"
            more = f", and {worst.more} more" if worst.more else ""
            yield (
                f"{one.mesh}, {one.engine}: the {where} differs by {worst.difference:.1e} of its size, "
                f"{worst.allowed:.1e} is allowed{more}"
            )


def agreement(
    reference: Reference,
    changed: Recipe,
    engines: Mapping[str, Any],
    meshes: Sequence[Mesh],
    *,
    tolerance: float,
    changes: Sequence[str],
    say: Say,
) -> Agreement:
    """Train the changed recipe on each mesh with each engine, from the same parameters and with the same batches, and
    compare. `tolerance`: that of a gradient, relative to its norm. `changes`: the overrides that the reference
    did not have."""
    devices, source, steps = jax.devices(), changed.data.open("train"), reference.steps
    result = Agreement(
        changed.name,
        steps,
        changed.batch,
        device=f"{len(devices)} x {devices[0].device_kind}",
        versions=versions(),
        reference={"device": reference.device, "engine": "jit", "versions": dict(reference.versions)},
        changes=_changes(changes, differences(reference.recipe, plain(changed))),
    )
    for mesh in meshes:
        for name, engine in engines.items():
            own = replace(changed, mesh=replace(mesh, rules=mesh.rules or changed.mesh.rules), engine=engine)
            text = mesh_text(_sizes(mesh, len(devices)))
            say(f"{text}, engine {name}")
            try:
                refuse_conflicts(own)
                found = trajectory(own, _as_many(devices, own.mesh), source, steps, start=reference.expected.before)
            except (RecipeError, DataError) as error:
                result.comparisons.append(Comparison(text, name, refused=error.message.partition("\n")[0]))
                continue
            worst = _worst(compare(reference.expected, found), reference.noise, tolerance)
            result.comparisons.append(Comparison(text, name, "", *worst))
    return result


def _changes(typed: Sequence[str], found: Sequence[str]) -> list[str]:
    """How the recipes differ, and which overrides have no line of their own, since they change no number but for
    rounding."""
    keys = {line.partition(":")[0] for line in found}
    return [*(one for one in typed if one.partition("=")[0] not in keys), *found]


def _sizes(mesh: Mesh, devices: int) -> Mapping[str, int]:
    """The size of each axis, of a mesh that may need other devices than there are."""
    fits = mesh.least <= devices and devices % mesh.least == 0
    return mesh.sizes(mesh.least if mesh.exact or not fits else devices)


def _as_many(devices: Sequence[Device], mesh: Mesh) -> Sequence[Device]:
    if mesh.least > len(devices):
        raise RecipeError(f"the mesh needs {mesh.least} devices; there are {len(devices)}")
    return devices[: mesh.least] if mesh.exact else devices


def tolerance(recipe: Recipe) -> float:
    """The allowed difference of a gradient for this precision, relative to its norm."""
    precision = recipe.precision
    if precision.narrow:
        return NARROW
    products = jax.default_backend() == "cpu" or precision.matmul == "highest"
    return EXACT if precision.compute == precision.loss == "float32" and products else ROUNDED


def _worst(found: Differences, noise: Differences, tolerance: float) -> tuple[Worst, Worst, Worst]:
    def of(own: dict[str, float], noisy: dict[str, float], share: float) -> Worst:
        allowed = {name: max(share * tolerance, NOISE * noisy[name]) for name in own}
        beyond = {name: float(np.nan_to_num(value / allowed[name], nan=np.inf)) for name, value in own.items()}
        name = max(beyond, key=lambda name: beyond[name])
        others = sum(value > 1 for value in beyond.values()) - (beyond[name] > 1)
        return Worst(name, own[name], allowed[name], others)

    return (
        of(found.loss, noise.loss, LOSS),
        of(found.gradients, noise.gradients, 1.0),
        of(found.parameters, noise.parameters, AFTER),
    )


def refuse_nothing(result: Agreement) -> None:
    """Raise RecipeError if no mesh and engine could be compared."""
    if all(one.refused for one in result.comparisons):
        hint = "name meshes that fit: --mesh '{data: 2, fsdp: 2}'"
        raise RecipeError("no mesh and engine fits this recipe: nothing was compared", hint)


def refuse_processes() -> None:
    """Raise EnvironmentFault if this is one of several processes, which have a part of each array alone."""
    if jax.process_count() > 1:
        raise EnvironmentFault("`agree` compares in one process", "start it on one host, or with --devices 8")
