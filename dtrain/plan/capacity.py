"""What could hold a run whose state is too large: a larger slice of the family, an optimizer with a smaller state."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dtrain.core.chips import PER_HOST
from dtrain.core.slices import Target, target
from dtrain.optim.optimizer import Adafactor, Shared
from dtrain.parallel.mesh import AXES, FSDP, TENSOR, Mesh
from dtrain.plan.memory import Memory
from dtrain.plan.plan import Plan
from dtrain.plan.variants import Candidate
from dtrain.plan.workers import PlanJob
from dtrain.recipe.crosscheck import problems_of
from dtrain.recipe.recipe import Recipe

TRIES = 8
"""Number of slices that are planned, the smallest that holds the state first; each has at least twice the chips of the
one before."""
TENSOR_SIZES = (2, 4, 8)
"""Sizes of the axis tensor that are tried where splitting parameters over fsdp alone does not fit."""


@dataclass(frozen=True)
class StateSize:
    """Parameters and optimizer state of a run, each array counted once."""

    total: int
    """Bytes over all devices."""
    on: Target

    @property
    def share(self) -> float:
        """Bytes on each device if every array were split evenly over all of them."""
        return self.total / self.on.devices

    @property
    def smallest(self) -> Target | None:
        """The smallest slice of the family with room for the state, split evenly; None if there is none."""
        return next((on for on in family(self.on) if self.total <= on.devices * room(on)), None)


def state(memory: Memory, on: Target) -> StateSize:
    """Size of the state, from a plan that was not compiled: only there are the memory classes sums of whole arrays.

    `memory.replicated` is subtracted, so that each array counts once.
    """
    shards = memory.classes["parameters"] + memory.classes["optimizer"]
    return StateSize((shards - memory.replicated) * on.devices, on)


def room(on: Target) -> float:
    """Bytes of one device's memory that a program may use; 0 for a CPU, whose memory is not in the chip table."""
    return on.chip.room if on.chip else 0.0


def family(on: Target) -> Iterator[Target]:
    """Every slice size of the target's chip, with the target's number of slices, the smallest first."""
    chip = on.chip
    if chip is None:
        return
    counts = sorted(chip.slices) if chip.dims else [*range(1, PER_HOST), *range(PER_HOST, chip.max_chips + 1, PER_HOST)]
    yield from (target(f"{chip.name}-{count * chip.units_per_chip}", on.slices) for count in counts)


def next_larger_slice(recipe: Recipe, needed: StateSize) -> Plan | None:
    """The smallest larger slice on which the run surely fits by arithmetic, of `TRIES` that hold its state; if there is
    none, the smallest on which it may fit."""
    tried: list[Target] = []
    close: Plan | None = None
    for on in family(needed.on):
        large_enough = on.chips > needed.on.chips and needed.total <= on.devices * room(on)
        if not large_enough or len(tried) == TRIES or (tried and on.chips < 2 * tried[-1].chips):
            continue
        candidates = [*itertools.islice(fit_to_slice(recipe, on), 1), *with_tensor(recipe, on)]
        tried += [on] if candidates else []  # the sizes of a model do not divide by every number of devices
        for candidate in sorted(candidates, key=lambda one: "batch" in one.changes):
            plan = PlanJob(candidate.recipe, on, quick=True).make()
            if isinstance(plan, Plan) and plan.surely_fits:
                return plan
            if isinstance(plan, Plan) and plan.fits:
                close = close or plan
    return close


def fit_to_slice(recipe: Recipe, on: Target) -> Iterator[Candidate]:
    """The recipe for a larger slice: unchanged; with all devices on fsdp; and with the batch rounded up to divide."""
    if not problems_of(recipe, on.devices):
        yield Candidate(recipe, {})
    yield from _split(recipe, on, 1)


def with_tensor(recipe: Recipe, on: Target) -> Iterator[Candidate]:
    """The recipe for a larger slice with its devices on fsdp and tensor, which splits activations as well."""
    for tensor in TENSOR_SIZES:
        if on.devices % tensor == 0:
            yield from _split(recipe, on, tensor)


def _split(recipe: Recipe, on: Target, tensor: int) -> Iterator[Candidate]:
    """The recipe with such a mesh, and with the batch rounded up to divide over it."""
    fsdp = on.devices // tensor
    sizes = dict.fromkeys(AXES, 1) | {FSDP: fsdp, TENSOR: tensor}
    crossed = {FSDP: on.slices} if on.slices > 1 else {}
    mesh = Mesh(**sizes, slices=crossed, rules=recipe.mesh.rules)  # pyright: ignore[reportArgumentType]
    unit = fsdp * recipe.accumulate
    batch = -(-recipe.batch // unit) * unit
    alone = dataclasses.replace(recipe, mesh=mesh)
    for changed, changes in (
        (alone, {"mesh": vars(mesh)}),
        (dataclasses.replace(alone, batch=batch), {"mesh": vars(mesh), "batch": batch}),
    ):
        if not problems_of(changed, on.devices):
            yield Candidate(changed, changes)


def with_adafactor(recipe: Recipe) -> Recipe | None:
    """The recipe with Adafactor, which factors second moments into rows and columns; None if it uses it already."""
    old = recipe.optimizer
    if old.kind == "adafactor":
        return None
    shared = {field.name: getattr(old, field.name) for field in dataclasses.fields(Shared)}
    return dataclasses.replace(recipe, optimizer=Adafactor(**shared))
