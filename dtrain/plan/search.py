"""Search for a faster mesh, remat policy, number of microbatches and compiler options for a recipe on a target.

First meshes, remat policies and microbatches are traced and ranked by arithmetic. Then half of the tries compile the
given recipe and the best of these; the other half compile the fastest of them, by the compiled plans, with other
engines and compiler options. The given recipe is always among them, so the winner is never slower.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from dtrain.core.counts import ms
from dtrain.core.errors import DtrainError, RecipeError
from dtrain.core.signals import leaving_at_once
from dtrain.core.slices import Target
from dtrain.plan.cache import cached_outcomes
from dtrain.plan.plan import Plan
from dtrain.plan.variants import Candidate, engine_variants, meshes, remat_variants
from dtrain.plan.workers import PlanJob
from dtrain.recipe.compose import merge, overriding
from dtrain.recipe.recipe import Recipe
from dtrain.recipe.yaml import dump, parse

MESHES, BEST = 16, 2
NOTHING = "interrupted before anything was compiled"
SLACK = 1.15
"""Another mesh is compiled only if arithmetic predicts at most this many times the step time of the recipe's mesh:
arithmetic compares meshes about this accurately, and remat policies of one mesh far better."""

Say = Callable[[str], None]


@dataclass
class SearchResult:
    """Result of a search."""

    base: Plan | None
    """Plan of the given recipe."""
    ranked: list[tuple[Candidate, Plan]] = field(default_factory=list)
    """Compiled plans that fit, the fastest first."""
    failed: list[tuple[Candidate, str]] = field(default_factory=list)
    tried: list[Candidate] = field(default_factory=list)
    """Variants that were compiled, or failed to compile."""
    stopped: bool = False
    """Interrupted before the end."""

    @property
    def winner(self) -> tuple[Candidate, Plan] | None:
        """The fastest variant that fits; None if none does."""
        return self.ranked[0] if self.ranked else None


@dataclass(frozen=True)
class _Compiling:
    """Compiles variants of one recipe and records the results."""

    result: SearchResult
    on: Target
    workers: int
    price: float | None
    say: Say

    def all(self, wanted: Sequence[Candidate]) -> None:
        """Compile each of them; `ranked` stays sorted."""
        recipes = [candidate.recipe for candidate in wanted]
        for number, outcome in cached_outcomes(recipes, self.on, self.workers, self.price):
            self._note(wanted[number], outcome)
            self.result.ranked.sort(key=lambda pair: pair[1].timing.seconds if pair[1].timing else math.inf)

    def _note(self, candidate: Candidate, outcome: Plan | DtrainError) -> None:
        self.result.tried.append(candidate)
        if isinstance(outcome, DtrainError):
            self.result.failed.append((candidate, outcome.message))
            self.say(f"  {candidate.text}: {outcome.message}")
            return
        if not candidate.changes:
            self.result.base = outcome
        self.say(f"  {candidate.text}: {_brief(outcome)}")
        if outcome.fits and outcome.timing:
            self.result.ranked.append((candidate, outcome))


def search(
    recipe: Recipe,
    on: Target,
    tries: int,
    workers: int,
    price: float | None,
    say: Say,
    on_interrupt: Callable[[], object] = lambda: None,
    nothing: str = f"{NOTHING}\n",
) -> SearchResult:
    """Compile at most `tries` variants, the first of which is the given recipe.

    On a KeyboardInterrupt it calls `on_interrupt` and returns the results so far. An interrupt before anything is
    compiled prints `nothing` to stdout and ends the process.
    """
    result = SearchResult(None)
    compiling = _Compiling(result, on, workers, price, say)
    try:
        with leaving_at_once(nothing, stdout=True):
            shapes = [Candidate(recipe, {}), *_shapes(recipe, on, say)]
        say(f"compiling {tries} variants at most, {workers} at a time: meshes, remat and microbatches first")
        _compile_shapes(shapes, tries, compiling)
        fastest = [candidate for candidate, _ in result.ranked] or shapes[:1]
        compiled = [candidate.recipe for candidate in result.tried]
        variants = [
            variant
            for shape in fastest
            for variant in engine_variants(shape, recipe, on)
            if variant.recipe not in compiled
        ]
        if variants[: tries - len(result.tried)]:
            say(f"compiler options for the fastest so far: {fastest[0].text}")
        compiling.all(variants[: tries - len(result.tried)])
    except KeyboardInterrupt:
        on_interrupt()
        result.stopped = True
    return result


def _compile_shapes(shapes: Sequence[Candidate], tries: int, compiling: _Compiling) -> None:
    """Compile the first, and the next for half of the other tries; one that does not fit is replaced by the next."""
    wanted, left = 1 + math.ceil((tries - 1) / 2), list(shapes)
    while left and (short := min(wanted - len(compiling.result.ranked), tries - len(compiling.result.tried))) > 0:
        compiling.all(left[:short])
        left = left[short:]


def _brief(plan: Plan) -> str:
    step = f"{ms(plan.timing.seconds)}, MFU {plan.timing.mfu:.1%}, " if plan.timing else ""
    verdict = "" if plan.fits else " (does not fit)"
    return f"{step}{plan.memory.needed / 2**30:.1f} GiB{verdict}"


def _shapes(recipe: Recipe, on: Target, say: Say) -> list[Candidate]:
    """The given recipe's mesh with the best remat and microbatches, and the best other meshes, by arithmetic."""
    base, known = Candidate(recipe, {}), list(meshes(recipe, on))
    say(f"ranking {min(len(known), MESHES)} of {len(known)} meshes by arithmetic")
    first = [candidate for candidate, _ in _ranked(known[:MESHES], on)[:BEST]]
    say("ranking remat policies and microbatches by arithmetic")
    own = _ranked([base, *remat_variants(base, on)], on)
    others = _ranked([*first, *(variant for candidate in first[:1] for variant in remat_variants(candidate, on))], on)
    now = next((seconds for candidate, seconds in own if candidate is base), math.inf)
    limit = SLACK * min((seconds for _, seconds in own), default=math.inf)
    better = [candidate for candidate, seconds in own if seconds < now]
    near = [candidate for candidate, seconds in others if seconds <= limit]
    return [shape for pair in zip_longest(better[:BEST], near[:BEST]) for shape in pair if shape]


def _ranked(candidates: Sequence[Candidate], on: Target) -> list[tuple[Candidate, float]]:
    """Candidates that fit with the smallest reserve of a compiler, with their seconds, the fastest first; if none fits,
    all of them. More microbatches are tried only if fewer do not fit."""
    plans: list[tuple[Candidate, Plan, float]] = []
    enough: set[str] = set()
    for candidate in candidates:
        rest = str({key: value for key, value in candidate.changes.items() if key != "accumulate"})
        if rest in enough:
            continue
        plan = PlanJob(candidate.recipe, on, quick=True).make()
        if isinstance(plan, Plan) and plan.timing:
            plans.append((candidate, plan, plan.timing.seconds))
            enough |= {rest} if plan.fits else set()
    fitting = [(candidate, seconds) for candidate, plan, seconds in plans if plan.fits]
    return sorted(fitting or [(candidate, seconds) for candidate, _, seconds in plans], key=lambda pair: pair[1])


def overlay(recipe_path: Path, folder: Path, overrides: Sequence[str], candidate: Candidate) -> str:
    """Text of a recipe that loads as the candidate: it includes the given recipe and overrides what differs.

    It keeps the run's name: a search changes how a step is computed, not which examples it trains on.
    """
    try:
        path = os.path.relpath(recipe_path.resolve(), folder.resolve())
    except ValueError as error:
        raise RecipeError(f"{recipe_path}: there is no relative path to it from {folder}") from error
    changes = parse(dump({"name": candidate.recipe.name, **candidate.changes}), "search")
    return dump({"include": path, **merge(overriding(overrides), changes).plain()})
