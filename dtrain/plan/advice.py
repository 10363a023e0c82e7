"""Suggest the nearest changes to a recipe that make its run fit: found by arithmetic, then compiled."""

import dataclasses
from collections.abc import Iterator, Sequence

from dtrain.assembly.explain import size_text
from dtrain.core.counts import ms
from dtrain.core.slices import Target
from dtrain.plan.capacity import StateSize, next_larger_slice, room, state, with_adafactor
from dtrain.plan.plan import Plan
from dtrain.plan.report import verdict
from dtrain.plan.variants import MICROBATCHES, Candidate, meshes, remat_variants
from dtrain.plan.workers import PlanJob, outcomes
from dtrain.recipe.recipe import Recipe

MESHES = 2
"""Number of meshes that are combined with a second change: those that need the least memory."""


def advice(recipe: Recipe, on: Target, workers: int, compiling: bool) -> Iterator[str]:
    """Lines that suggest what fits instead. If no mesh of the target holds the state: other slices and optimizers."""
    outcome = PlanJob(recipe, on, quick=True).make()
    needed = state(outcome.memory, on) if isinstance(outcome, Plan) and on.chip else None
    if needed and needed.share > room(on):
        yield from _alternatives(recipe, needed)
        return
    fitting = nearest(recipe, on, workers, compiling)
    yield from advised(fitting, compiling)
    if fitting:
        return
    if needed:
        yield from _larger(recipe, needed)
    structure = recipe.model.structure
    if not compiling and structure.offload and not structure.offloads:
        change = ", ".join(f"model.{name}={value}" for name, value in structure.offload.items())
        yield f"  not planned: {change}, which keeps the inputs of layers in the host's memory"


def advised(fitting: Sequence[tuple[Candidate, Plan]], compiling: bool) -> Iterator[str]:
    """Lines that list the changes that fit, or state that none does."""
    if fitting:
        yield f"these changes fit ({'compiled' if compiling else 'by arithmetic; not compiled'}):"
        yield from (f"  {candidate.text}: {_figures(plan)}" for candidate, plan in fitting)
    else:
        how = "compiled" if compiling else "planned by arithmetic"
        yield f"none of the changes of microbatches, remat or mesh that were {how} fits"


def nearest(recipe: Recipe, on: Target, workers: int, compiling: bool) -> list[tuple[Candidate, Plan]]:
    """Changes of microbatches, remat or mesh that fit: single ones, else pairs; the fastest first.

    With `compiling` the candidates are compiled, and only those whose programs fit are returned; else arithmetic
    alone decides.
    """
    variants = (*remat_variants(Candidate(recipe, {}), on, _halvings(recipe)), *meshes(recipe, on))
    planned = _planned([candidate for candidate in variants if len(candidate.changes) == 1], on)
    fitting = _fitting(planned)
    if not fitting:
        traced = [pair for pair in planned if "mesh" in pair[0].changes and pair[1].tier == "quick"]
        small = sorted(traced, key=lambda pair: pair[1].memory.needed)[:MESHES]
        double = [
            two for mesh, _ in small for two in remat_variants(mesh, on, _halvings(recipe)) if len(two.changes) == 2
        ]
        fitting = _fitting(_planned(double, on))
    if not compiling:
        return fitting[:3]
    candidates = [candidate for candidate, _ in fitting[:3]] or _offloaded(recipe)
    compiled = outcomes([PlanJob(candidate.recipe, on) for candidate in candidates], workers)
    plans = {number: plan for number, plan in compiled if isinstance(plan, Plan) and plan.fits}
    return [(candidates[number], plans[number]) for number in sorted(plans)]


def _halvings(recipe: Recipe) -> tuple[int, ...]:
    """Numbers of microbatches to try, up to one example in each."""
    return tuple(dict.fromkeys((*MICROBATCHES, *(2**n for n in range(recipe.batch.bit_length())))))


def _offloaded(recipe: Recipe) -> list[Candidate]:
    """The recipe with inputs of layers in host memory, to be compiled: the quick tier does not model transfers."""
    model = recipe.model
    if not model.structure.offload or model.structure.offloads:
        return []
    changed = dataclasses.replace(recipe, model=model.replaced(model.structure.offload))
    return [Candidate(changed, {"model": model.overrides(model.structure.offload)})]


def _planned(candidates: Sequence[Candidate], on: Target) -> list[tuple[Candidate, Plan]]:
    """Quick plans of the candidates; those that cannot be planned are left out."""
    pairs = [(candidate, PlanJob(candidate.recipe, on, quick=True).make()) for candidate in candidates]
    return [(candidate, plan) for candidate, plan in pairs if isinstance(plan, Plan)]


def _fitting(planned: Sequence[tuple[Candidate, Plan]]) -> list[tuple[Candidate, Plan]]:
    """Plans that fit with room for the compiler's reserve, the fastest first."""
    fitting = [(candidate, plan) for candidate, plan in planned if plan.fits]
    return sorted(fitting, key=lambda pair: pair[1].timing.seconds if pair[1].timing else 0.0)


def _alternatives(recipe: Recipe, needed: StateSize) -> Iterator[str]:
    """Alternatives where no mesh of the target holds the state: a larger slice, an optimizer with a smaller state."""
    yield f"no mesh of {needed.on.name} holds the state; alternatives (by arithmetic; not compiled):"
    yield from _larger(recipe, needed)
    cheaper = with_adafactor(recipe)
    outcome = PlanJob(cheaper, needed.on, quick=True).make() if cheaper else None
    if not isinstance(outcome, Plan):
        return
    smaller = state(outcome.memory, needed.on)
    start = f"  optimizer adafactor: state of {size_text(smaller.total)} in total"
    if smaller.share <= room(needed.on):
        verdict = "fits" if outcome.fits else f"needs {size_text(outcome.memory.needed)} in total and does not fit"
        yield f"{start}, {size_text(smaller.share)} a device of {needed.on.name}; the run {verdict}"
    elif smaller.smallest:
        yield f"{start}; the smallest slice that holds it is {smaller.smallest.name}"


def _larger(recipe: Recipe, needed: StateSize) -> Iterator[str]:
    plan = next_larger_slice(recipe, needed)
    if plan is None:
        kind = needed.on.chip.name if needed.on.chip else "this kind"
        yield f"  none of the larger slices of {kind} that were planned fits"
        return
    sizes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1)
    batch = f", batch {plan.recipe.batch}" if plan.recipe.batch != recipe.batch else ""
    yield f"  {plan.target.name} with mesh {sizes}{batch}: {_figures(plan)}"


def _figures(plan: Plan) -> str:
    step = f", {ms(plan.timing.seconds)} a step" if plan.timing else ""
    note = " (may fit: the compiler may need more)" if verdict(plan) == "may fit" else ""
    return f"{size_text(plan.memory.needed)} of {size_text(plan.memory.room)}{step}{note}"
