"""A better mesh, remat policy, microbatch and set of compiler options for a recipe on a target.

First by arithmetic: meshes that fit together, traced and ranked; then the best few are compiled, the
recipe as it stands among them, so that the winner is never worse than that.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

from dtrain.errors import DtrainError, RecipeError
from dtrain.parallel.jit import Jit
from dtrain.parallel.mesh import AXES, Mesh, visible
from dtrain.parallel.shard_map import ShardMap
from dtrain.plan.cache import remembered
from dtrain.plan.plan import Plan
from dtrain.plan.workers import Job
from dtrain.recipe.compose import merge, overriding
from dtrain.recipe.crosscheck import problems_of
from dtrain.recipe.recipe import Recipe
from dtrain.recipe.yaml import dump, parse
from dtrain.slices import Target

OVERLAP = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
    "xla_enable_async_reduce_scatter_fusion": True,
}
"""Collectives behind matrix products."""

WHOLE_PRODUCTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
"""No product cut up to go with the parts of its operand as they arrive."""

WAYS: tuple[tuple[str, type[Jit] | type[ShardMap], Mapping[str, Any], int, int], ...] = (
    ("", Jit, {}, 0, 1),
    ("collectives overlapped", ShardMap, OVERLAP, 1, 0),
    ("collectives overlapped", Jit, OVERLAP, 1, 2),
    ("products whole", Jit, WHOLE_PRODUCTS, 1, 3),
    ("products whole, collectives overlapped", Jit, OVERLAP | WHOLE_PRODUCTS, 2, 2),
    ("", ShardMap, {}, 2, 3),
)
"""Ways to compile a step: a name, engine and options; then how far back each stands in the order of trying,
for the recipe as it is and for shapes that arithmetic found, which goes by what is placed by hand."""

REMAT = ("none", "attention", "dots", "full")
MICROBATCHES = (1, 2, 4)
MESHES, BEST = 16, 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A recipe that differs from the given one, and how."""

    recipe: Recipe
    changes: dict[str, Any]
    """What to write over the recipe: a plain tree."""

    @property
    def text(self) -> str:
        """What changed, in a line."""
        return ", ".join(map(self._said, self.changes)) or "the recipe as it is"

    def _said(self, key: str) -> str:
        value = self.changes[key]
        if key == "mesh":
            sizes = {axis: getattr(self.recipe.mesh, axis) for axis in AXES}
            return "mesh " + " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1)
        if key == "engine":
            known = [(name, set(options.items())) for name, _, options, *_ in WAYS if options]
            names = [name for name, options in known if options <= set(value.get("xla", {}).items())]
            return ", ".join([value["kind"], *names[-1:]])
        if key == "model":
            return ", ".join(f"{name} {what}" for name, what in value.items())
        return f"{value} microbatches" if key == "accumulate" else f"{key} {value}"


@dataclass
class Found:
    """What a search came to."""

    base: Plan | None
    """The recipe as it stands."""
    ranked: list[tuple[Candidate, Plan]] = field(default_factory=list)
    """Compiled plans that fit, the fastest first."""
    failed: list[tuple[Candidate, str]] = field(default_factory=list)
    tried: int = 0
    """Variants that were compiled, or failed to."""
    stopped: bool = False
    """Interrupted before all was tried."""

    @property
    def winner(self) -> tuple[Candidate, Plan] | None:
        """The fastest that fits."""
        return self.ranked[0] if self.ranked else None


def search(
    recipe: Recipe,
    on: Target,
    tries: int,
    workers: int,
    price: float | None,
    say: Say,
    heard: Callable[[], object] = int,
) -> Found:
    """Try at most `tries` compiled variants, the recipe as it stands being the first.

    Interrupted, it calls `heard` and gives what it has.
    """
    found = Found(None)
    base = Candidate(recipe, {})
    try:
        shapes = _shapes(recipe, on, say)
        wanted = [base, *variants(recipe, [base, *shapes])][:tries]
        say(f"compiling {len(wanted)} variants, {workers} at a time")
        for number, outcome in remembered([candidate.recipe for candidate in wanted], on, workers, price):
            candidate = wanted[number]
            found.tried += 1
            if isinstance(outcome, DtrainError):
                found.failed.append((candidate, outcome.message))
                say(f"  {candidate.text}: {outcome.message}")
                continue
            found.base = outcome if candidate is base else found.base
            say(f"  {candidate.text}: {_brief(outcome)}")
            if outcome.fits and outcome.timing:
                found.ranked.append((candidate, outcome))
    except KeyboardInterrupt:
        heard()
        found.stopped = True
    found.ranked.sort(key=lambda pair: pair[1].timing.seconds if pair[1].timing else float("inf"))
    return found


def _brief(plan: Plan) -> str:
    step = f"{1e3 * plan.timing.seconds:,.0f} ms, MFU {plan.timing.mfu:.1%}, " if plan.timing else ""
    verdict = "" if plan.fits else " (does not fit)"
    return f"{step}{plan.memory.peak / 2**30:.1f} GiB{verdict}"


def _shapes(recipe: Recipe, on: Target, say: Say) -> list[Candidate]:
    """By arithmetic: the recipe with the best remat and microbatches for its own mesh, then the best other meshes."""
    base, known = Candidate(recipe, {}), list(meshes(recipe, on))[:MESHES]
    say(f"{len(known)} meshes by arithmetic")
    first = _ranked(known, on)[:BEST]
    say("remat policies and microbatches by arithmetic")
    own = _ranked(list(finer(base, on)), on)[:BEST]
    others = [*first, *(variant for candidate in first[:1] for variant in finer(candidate, on))]
    pairs = zip_longest(own, _ranked(others, on)[:BEST])
    return [shape for pair in pairs for shape in pair if shape]


def _ranked(wanted: Sequence[Candidate], on: Target) -> list[Candidate]:
    """Those that fit, the fastest first. More microbatches are only tried where fewer do not fit."""
    plans: list[tuple[int, Plan]] = []
    enough: set[str] = set()
    for number, candidate in enumerate(wanted):
        rest = str({key: value for key, value in candidate.changes.items() if key != "accumulate"})
        if rest in enough:
            continue
        made = Job(candidate.recipe, on, quick=True).make()
        if isinstance(made, Plan) and made.timing:
            plans.append((number, made))
            enough |= {rest} if made.fits else set()
    fitting = [(number, made) for number, made in plans if made.fits] or plans
    order = sorted(fitting, key=lambda pair: (pair[1].timing.seconds if pair[1].timing else 0.0, pair[0]))
    return [wanted[number] for number, _ in order]


def meshes(recipe: Recipe, on: Target) -> Iterator[Candidate]:
    """Every mesh of fsdp, data, tensor and expert over the devices that the recipe's sizes allow but its own, plain
    ones first."""
    count, old = getattr(getattr(recipe.model, "experts", None), "count", 1), recipe.mesh
    sizes = [n for n in range(1, on.devices + 1) if on.devices % n == 0]
    shapes = [
        (tensor, expert, on.devices // (tensor * expert * fsdp), fsdp)
        for tensor in sizes
        if tensor <= 8
        for expert in sizes
        if count % expert == 0 and on.devices % (tensor * expert) == 0
        for fsdp in sizes
        if on.devices % (tensor * expert * fsdp) == 0
    ]
    for tensor, expert, data, fsdp in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[2])):
        sizes = dict.fromkeys(AXES, 1) | {"data": data, "fsdp": fsdp, "tensor": tensor, "expert": expert}
        crossed = dict.fromkeys(old.slices, 1) | ({"data": on.slices} if on.slices > 1 else {})
        if data % on.slices or sizes == visible(old.sizes(on.devices)):
            continue
        mesh = Mesh(**sizes, slices=crossed, rules=old.rules)  # pyright: ignore[reportArgumentType]
        changed = dataclasses.replace(recipe, mesh=mesh)
        said = {key: value for key, value in vars(mesh).items() if value != getattr(old, key)}
        if not problems_of(changed, on.devices):
            yield Candidate(changed, {"mesh": said})


def finer(candidate: Candidate, on: Target) -> Iterator[Candidate]:
    """The same mesh with other remat policies, microbatches, and the logits whole."""
    recipe, model = candidate.recipe, candidate.recipe.model
    choices = {
        "remat": REMAT if hasattr(model, "remat") else (),
        "loss_chunks": (1,) if getattr(model, "loss_chunks", 1) > 1 else (),
    }
    own = {name: getattr(model, name) for name, values in choices.items() if values}
    for values in product(*(dict.fromkeys((own[name], *choices[name])) for name in own)):
        fields = {name: value for name, value in zip(own, values, strict=True) if value != own[name]}
        for parts in sorted({recipe.accumulate, *MICROBATCHES}):
            changed_model: Any = dataclasses.replace(model, **fields)  # pyright: ignore[reportArgumentType]
            changed = dataclasses.replace(recipe, model=changed_model, accumulate=parts)
            changes = ({"model": fields} if fields else {}) | (
                {"accumulate": parts} if parts != recipe.accumulate else {}
            )
            if changes and not problems_of(changed, on.devices):
                yield Candidate(changed, candidate.changes | changes)


def variants(recipe: Recipe, shapes: Sequence[Candidate]) -> Iterator[Candidate]:
    """Each shape in every way, the likeliest first; the first shape is the recipe as it is."""
    cases = [
        (place + (found if place else plain), shape, engine, options)
        for place, shape in enumerate(shapes)
        for _, engine, options, plain, found in WAYS
    ]
    for _, shape, engine, options in sorted(cases, key=lambda case: case[0]):
        made = engine(xla={**recipe.engine.xla, **options})
        changed = dataclasses.replace(shape.recipe, engine=made)
        said = {"kind": made.kind} | ({"xla": made.xla} if made.xla else {})
        if changed != recipe and not problems_of(changed, None):
            yield Candidate(changed, shape.changes | ({"engine": said} if made != recipe.engine else {}))


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
