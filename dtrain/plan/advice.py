"""What would make a run fit: the nearest changes to its recipe, found by arithmetic and then compiled."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from dtrain.core.slices import Target
from dtrain.plan.capacity import State, factored, larger, room, state
from dtrain.plan.memory import roomy
from dtrain.plan.plan import Plan
from dtrain.plan.report import ms, verdict
from dtrain.plan.variants import MICROBATCHES, Candidate, finer, meshes
from dtrain.plan.workers import PlanJob, outcomes
from dtrain.recipe.recipe import Recipe
from dtrain.train.explain import size_text

MESHES = 2
"""Meshes that are tried together with another change: those that need the least memory."""


def advice(recipe: Recipe, on: Target, workers: int, compiling: bool) -> Iterator[str]:
    """What fits instead, in lines. Where no mesh of the target can hold the state, what else could."""
    made = PlanJob(recipe, on, quick=True).make()
    needed = state(made.memory, on) if isinstance(made, Plan) and on.chip else None
    if needed and needed.share > room(on):
        yield from _elsewhere(recipe, needed)
        return
    found = nearest(recipe, on, workers, compiling)
    yield from advised(found, compiling)
    if found:
        return
    if needed:
        yield from _larger(recipe, needed)
    if not compiling and getattr(recipe.model, "remat", "offload") != "offload":
        yield "  not planned: model.remat=offload, which keeps the inputs of layers in the host's memory"


def advised(found: Sequence[tuple[Candidate, Plan]], compiling: bool) -> Iterator[str]:
    """Recipes near the given one that fit."""
    if found:
        yield f"what fits ({'compiled' if compiling else 'by arithmetic; not compiled'}):"
        yield from (f"  {candidate.text}: {_figures(plan)}" for candidate, plan in found)
    else:
        how = "compiled" if compiling else "planned by arithmetic"
        yield f"no change of microbatches, remat or mesh that was {how} fits"


def nearest(recipe: Recipe, on: Target, workers: int, compiling: bool) -> list[tuple[Candidate, Plan]]:
    """Changes that fit, the fewest first and of those the fastest: microbatches, remat, mesh, or two of them.

    Compiled where that is wanted, and then only those whose programs do fit; else by arithmetic alone.
    """
    same = Candidate(recipe, {})
    single = [one for one in (*finer(same, on, _halvings(recipe)), *meshes(recipe, on)) if len(one.changes) == 1]
    alone = _planned(single, on)
    fitting = _fitting(alone)
    if not fitting:
        traced = [pair for pair in alone if "mesh" in pair[0].changes and pair[1].tier == "quick"]
        small = sorted(traced, key=lambda pair: pair[1].memory.needed)[:MESHES]
        double = [two for one, _ in small for two in finer(one, on, _halvings(recipe)) if len(two.changes) == 2]
        fitting = _fitting(_planned(double, on))
    if not compiling:
        return fitting[:3]
    wanted = [candidate for candidate, _ in fitting[:3]] or _offloaded(recipe)
    made = outcomes([PlanJob(candidate.recipe, on) for candidate in wanted], workers)
    plans = {number: plan for number, plan in made if isinstance(plan, Plan) and plan.fits}
    return [(wanted[number], plans[number]) for number in sorted(plans)]


def _halvings(recipe: Recipe) -> tuple[int, ...]:
    """Microbatches down to one example each."""
    return tuple(dict.fromkeys((*MICROBATCHES, *(2**n for n in range(recipe.batch.bit_length())))))


def _offloaded(recipe: Recipe) -> list[Candidate]:
    """Arithmetic does not know the host's memory; the compiler does."""
    model: Any = recipe.model
    if getattr(model, "remat", "offload") == "offload":
        return []
    changed = dataclasses.replace(recipe, model=dataclasses.replace(model, remat="offload"))
    return [Candidate(changed, {"model": {"remat": "offload"}})]


def _planned(wanted: Sequence[Candidate], on: Target) -> list[tuple[Candidate, Plan]]:
    made = [(candidate, PlanJob(candidate.recipe, on, quick=True).make()) for candidate in wanted]
    return [(candidate, plan) for candidate, plan in made if isinstance(plan, Plan)]


def _fitting(planned: Sequence[tuple[Candidate, Plan]]) -> list[tuple[Candidate, Plan]]:
    """Those with room, the fastest first."""
    fitting = [(candidate, plan) for candidate, plan in planned if roomy(plan.memory, plan.target.platform)]
    return sorted(fitting, key=lambda pair: pair[1].timing.seconds if pair[1].timing else 0.0)


def _elsewhere(recipe: Recipe, needed: State) -> Iterator[str]:
    """No mesh of the target holds the state: a larger slice, or an optimizer with a smaller state."""
    yield f"no mesh of {needed.on.name} holds the state: what else does (by arithmetic; not compiled):"
    yield from _larger(recipe, needed)
    changed = factored(recipe)
    made = PlanJob(changed, needed.on, quick=True).make() if changed else None
    if not isinstance(made, Plan):
        return
    less = state(made.memory, needed.on)
    start = f"  optimizer adafactor: state of {size_text(less.total)} in all"
    if less.share <= room(needed.on):
        verdict = "fits" if made.fits else f"with all else {size_text(made.memory.needed)}, does not fit"
        yield f"{start}, {size_text(less.share)} a device of {needed.on.name}; the run {verdict}"
    elif less.smallest:
        yield f"{start}; the smallest slice that holds it is {less.smallest.name}"


def _larger(recipe: Recipe, needed: State) -> Iterator[str]:
    found = larger(recipe, needed)
    if found is None:
        yield f"  no larger slice of {needed.on.chip.name if needed.on.chip else 'this kind'} that was planned fits it"
        return
    sizes = " x ".join(f"{axis} {size}" for axis, size in found.mesh.items() if size > 1)
    batch = f", batch {found.recipe.batch}" if found.recipe.batch != recipe.batch else ""
    yield f"  {found.target.name} with mesh {sizes}{batch}: {_figures(found)}"


def _figures(plan: Plan) -> str:
    step = f", {ms(plan.timing.seconds)} a step" if plan.timing else ""
    note = " (may fit: a compiler reserves more than the peak)" if verdict(plan) == "may fit" else ""
    return f"{size_text(plan.memory.needed)} of {size_text(plan.memory.room)}{step}{note}"
