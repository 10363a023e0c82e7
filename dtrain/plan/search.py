"""A better mesh, remat policy, microbatch and set of compiler options for a recipe on a target.

First by arithmetic: meshes, remat policies and microbatches, traced and ranked. Then half of the tries
compile the recipe as it stands and the best of those; the other half compile the fastest of them, by what
the compiler made, with other engines and compiler options. So the winner is never worse than the recipe.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from dtrain.core.errors import DtrainError, RecipeError
from dtrain.core.slices import Target
from dtrain.plan.cache import remembered
from dtrain.plan.memory import roomy
from dtrain.plan.plan import Plan
from dtrain.plan.variants import Candidate, finer, meshes, ways
from dtrain.plan.workers import PlanJob
from dtrain.recipe.compose import merge, overriding
from dtrain.recipe.recipe import Recipe
from dtrain.recipe.yaml import dump, parse

MESHES, BEST = 16, 2
SLACK = 1.15
"""Another mesh that arithmetic has slower than the recipe's own by more is not compiled: arithmetic compares meshes
no more exactly than that, and remat policies of one mesh far better."""

Say = Callable[[str], None]


@dataclass
class SearchResult:
    """What a search came to."""

    base: Plan | None
    """The recipe as it stands."""
    ranked: list[tuple[Candidate, Plan]] = field(default_factory=list)
    """Compiled plans that fit, the fastest first."""
    failed: list[tuple[Candidate, str]] = field(default_factory=list)
    tried: list[Candidate] = field(default_factory=list)
    """Variants that were compiled, or failed to."""
    stopped: bool = False
    """Interrupted before all was tried."""

    @property
    def winner(self) -> tuple[Candidate, Plan] | None:
        """The fastest that fits."""
        return self.ranked[0] if self.ranked else None


@dataclass(frozen=True)
class _Compiling:
    """Variants of one recipe, compiled and noted."""

    found: SearchResult
    on: Target
    workers: int
    price: float | None
    say: Say

    def all(self, wanted: Sequence[Candidate]) -> None:
        """Each of them; `ranked` stays in order."""
        recipes = [candidate.recipe for candidate in wanted]
        for number, outcome in remembered(recipes, self.on, self.workers, self.price):
            self._note(wanted[number], outcome)
            self.found.ranked.sort(key=lambda pair: pair[1].timing.seconds if pair[1].timing else math.inf)

    def _note(self, candidate: Candidate, outcome: Plan | DtrainError) -> None:
        self.found.tried.append(candidate)
        if isinstance(outcome, DtrainError):
            self.found.failed.append((candidate, outcome.message))
            self.say(f"  {candidate.text}: {outcome.message}")
            return
        if not candidate.changes:
            self.found.base = outcome
        self.say(f"  {candidate.text}: {_brief(outcome)}")
        if outcome.fits and outcome.timing:
            self.found.ranked.append((candidate, outcome))


def search(
    recipe: Recipe,
    on: Target,
    tries: int,
    workers: int,
    price: float | None,
    say: Say,
    on_interrupt: Callable[[], object] = int,
) -> SearchResult:
    """Try at most `tries` compiled variants, the recipe as it stands being the first.

    Interrupted, it calls `heard` and gives what it has.
    """
    found = SearchResult(None)
    compiling = _Compiling(found, on, workers, price, say)
    try:
        shapes = [Candidate(recipe, {}), *_shapes(recipe, on, say)]
        say(f"compiling {tries} variants at most, {workers} at a time: meshes, remat and microbatches first")
        _compile_shapes(shapes, tries, compiling)
        fastest = [candidate for candidate, _ in found.ranked] or shapes[:1]
        known = [candidate.recipe for candidate in found.tried]
        others = [way for shape in fastest for way in ways(shape, recipe, on) if way.recipe not in known]
        if others[: tries - len(found.tried)]:
            say(f"compiler options for what is the fastest so far: {fastest[0].text}")
        compiling.all(others[: tries - len(found.tried)])
    except KeyboardInterrupt:
        on_interrupt()
        found.stopped = True
    return found


def _compile_shapes(shapes: Sequence[Candidate], tries: int, compiling: _Compiling) -> None:
    """The first, then half of the other tries; in place of one that does not fit, the next."""
    wanted, left = 1 + math.ceil((tries - 1) / 2), list(shapes)
    while left and (short := min(wanted - len(compiling.found.ranked), tries - len(compiling.found.tried))) > 0:
        compiling.all(left[:short])
        left = left[short:]


def _brief(plan: Plan) -> str:
    step = f"{1e3 * plan.timing.seconds:,.0f} ms, MFU {plan.timing.mfu:.1%}, " if plan.timing else ""
    verdict = "" if plan.fits else " (does not fit)"
    return f"{step}{plan.memory.needed / 2**30:.1f} GiB{verdict}"


def _shapes(recipe: Recipe, on: Target, say: Say) -> list[Candidate]:
    """By arithmetic: the recipe with the best remat and microbatches for its own mesh, then the best other meshes."""
    base, known = Candidate(recipe, {}), list(meshes(recipe, on))
    say(f"{min(len(known), MESHES)} of {len(known)} meshes by arithmetic")
    first = [candidate for candidate, _ in _ranked(known[:MESHES], on)[:BEST]]
    say("remat policies and microbatches by arithmetic")
    own = _ranked([base, *finer(base, on)], on)
    others = _ranked([*first, *(variant for candidate in first[:1] for variant in finer(candidate, on))], on)
    now = next((seconds for candidate, seconds in own if candidate is base), math.inf)
    limit = SLACK * min((seconds for _, seconds in own), default=math.inf)
    better = [candidate for candidate, seconds in own if seconds < now]
    near = [candidate for candidate, seconds in others if seconds <= limit]
    return [shape for pair in zip_longest(better[:BEST], near[:BEST]) for shape in pair if shape]


def _ranked(wanted: Sequence[Candidate], on: Target) -> list[tuple[Candidate, float]]:
    """Those with room for what a compiler reserves at least, with their seconds, the fastest first; all where none
    has. More microbatches are only tried where fewer have no room."""
    plans: list[tuple[Candidate, Plan, float]] = []
    enough: set[str] = set()
    for candidate in wanted:
        rest = str({key: value for key, value in candidate.changes.items() if key != "accumulate"})
        if rest in enough:
            continue
        made = PlanJob(candidate.recipe, on, quick=True).make()
        if isinstance(made, Plan) and made.timing:
            plans.append((candidate, made, made.timing.seconds))
            enough |= {rest} if roomy(made.memory, on.platform) else set()
    fitting = [(candidate, seconds) for candidate, made, seconds in plans if roomy(made.memory, on.platform)]
    return sorted(fitting or [(candidate, seconds) for candidate, _, seconds in plans], key=lambda pair: pair[1])


def overlay(recipe_path: Path, folder: Path, overrides: Sequence[str], candidate: Candidate) -> str:
    """The text of a recipe that loads as the candidate's: it includes the given one, and goes over it.

    It keeps the run's name: what a search changes are numbers of no example and no step.
    """
    try:
        path = os.path.relpath(recipe_path.resolve(), folder.resolve())
    except ValueError as error:
        raise RecipeError(f"{recipe_path}: cannot be reached from {folder}") from error
    changes = parse(dump({"name": candidate.recipe.name, **candidate.changes}), "search")
    return dump({"include": path, **merge(overriding(overrides), changes).plain()})
