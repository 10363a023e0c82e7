"""What would make a run fit: the nearest changes to its recipe, found by arithmetic and then compiled."""

from collections.abc import Sequence

from dtrain.plan.plan import Plan
from dtrain.plan.search import Candidate, finer, meshes
from dtrain.plan.workers import Job, outcomes
from dtrain.recipe.recipe import Recipe
from dtrain.slices import Target

MARGIN = 0.97
"""By arithmetic a change must leave this much room before it is compiled."""


def nearest(recipe: Recipe, on: Target, workers: int, compiling: bool) -> list[tuple[Candidate, Plan]]:
    """Changes that fit, the fewest first and of those the fastest: microbatches, remat, mesh, or two of them.

    Compiled where asked for, and then only those whose programs do fit; else by arithmetic alone.
    """
    same = Candidate(recipe, {})
    single = [one for one in (*finer(same, on), *meshes(recipe, on)) if len(one.changes) == 1]
    fitting = _fitting(single, on)
    if not fitting:
        double = [two for one in meshes(recipe, on) for two in finer(one, on)]
        fitting = _fitting(double[-24:], on)
    if not compiling:
        return fitting[:3]
    wanted = [candidate for candidate, _ in fitting[:3]]
    made = outcomes([Job(candidate.recipe, on) for candidate in wanted], workers)
    plans = {number: plan for number, plan in made if isinstance(plan, Plan) and plan.fits}
    return [(wanted[number], plans[number]) for number in sorted(plans)]


def _fitting(wanted: Sequence[Candidate], on: Target) -> list[tuple[Candidate, Plan]]:
    made = [(candidate, Job(candidate.recipe, on, quick=True).make()) for candidate in wanted]
    plans = [(candidate, plan) for candidate, plan in made if isinstance(plan, Plan)]
    roomy = [(candidate, plan) for candidate, plan in plans if plan.memory.peak < MARGIN * plan.memory.room]
    return sorted(roomy, key=lambda pair: pair[1].timing.seconds if pair[1].timing else 0.0)
