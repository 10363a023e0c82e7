"""What would hold a run whose state is too large: a larger slice of the family, an optimizer with a smaller state."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from dtrain.core.chips import PER_HOST
from dtrain.core.slices import Target, target
from dtrain.optim.optimizer import Adafactor, Shared
from dtrain.parallel.mesh import AXES, Mesh
from dtrain.plan.memory import Memory, roomy
from dtrain.plan.plan import Plan
from dtrain.plan.variants import Candidate
from dtrain.plan.workers import PlanJob
from dtrain.recipe.crosscheck import problems_of
from dtrain.recipe.recipe import Recipe

TRIES = 4
"""Slices that are planned, from the smallest that holds the state on."""


@dataclass(frozen=True)
class State:
    """Parameters and optimizer state of a run, each array counted once."""

    total: int
    """Bytes on all devices."""
    on: Target

    @property
    def share(self) -> float:
        """Bytes of each device where every array is split evenly over all of them."""
        return self.total / self.on.devices

    @property
    def smallest(self) -> Target | None:
        """The smallest slice of the family with room for it, split evenly; None where there is none."""
        return next((on for on in family(self.on) if self.total <= on.devices * room(on)), None)


def state(memory: Memory, on: Target) -> State:
    """Of a plan that was not compiled, whose classes are whole arrays."""
    held = memory.classes["parameters"] + memory.classes["optimizer"]
    return State((held - memory.replicated) * on.devices, on)


def room(on: Target) -> float:
    """Bytes that one device lends to a program; none of a CPU, whose memory is this machine's."""
    return on.chip.room if on.chip else 0.0


def family(on: Target) -> Iterator[Target]:
    """Every slice of the target's kind, as many of them joined, the smallest first."""
    chip = on.chip
    if chip is None:
        return
    counts = sorted(chip.slices) if chip.dims else [*range(1, PER_HOST), *range(PER_HOST, chip.most + 1, PER_HOST)]
    yield from (target(f"{chip.name}-{count * chip.counted}", on.slices) for count in counts)


def larger(recipe: Recipe, needed: State) -> Plan | None:
    """The smallest slice on which the run fits by arithmetic, of the first few that hold its state."""
    able = [on for on in family(needed.on) if on.chips > needed.on.chips and needed.total <= on.devices * room(on)]
    for on in able[:TRIES]:
        wanted = next(spread(recipe, on), None)
        made = PlanJob(wanted.recipe, on, quick=True).make() if wanted else None
        if isinstance(made, Plan) and roomy(made.memory, on.platform):
            return made
    return None


def spread(recipe: Recipe, on: Target) -> Iterator[Candidate]:
    """The recipe on a larger slice: as it is, over fsdp alone, or with a batch that all devices share as well."""
    sizes = dict.fromkeys(AXES, 1) | {"fsdp": on.devices}
    crossed = {"fsdp": on.slices} if on.slices > 1 else {}
    mesh = Mesh(**sizes, slices=crossed, rules=recipe.mesh.rules)  # pyright: ignore[reportArgumentType]
    unit = on.devices * recipe.accumulate
    batch = -(-recipe.batch // unit) * unit
    alone = dataclasses.replace(recipe, mesh=mesh)
    for changed, changes in (
        (recipe, {}),
        (alone, {"mesh": vars(mesh)}),
        (dataclasses.replace(alone, batch=batch), {"mesh": vars(mesh), "batch": batch}),
    ):
        if not problems_of(changed, on.devices):
            yield Candidate(changed, changes)


def factored(recipe: Recipe) -> Recipe | None:
    """The recipe with Adafactor, whose second moments are rows and columns; None where it has that already."""
    old = recipe.optimizer
    if old.kind == "adafactor":
        return None
    kept = {field.name: getattr(old, field.name) for field in dataclasses.fields(Shared)}
    return dataclasses.replace(recipe, optimizer=Adafactor(**kept))
