"""Plans kept between searches, under all that they depend on: recipe, target, compilers, this program's text."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtrain.core.slices import Target
from dtrain.plan.memory import Buffer, Memory
from dtrain.plan.money import Money
from dtrain.plan.plan import Plan, Timing
from dtrain.plan.replay import CollectiveCost, StepCost
from dtrain.plan.workers import Outcome, PlanJob, outcomes
from dtrain.recipe.load import plain
from dtrain.recipe.recipe import Recipe


def remembered(
    wanted: Sequence[Recipe], on: Target, workers: int, price: float | None
) -> Iterator[tuple[int, Outcome]]:
    """What came of each compiled plan, from the cache where it was made before."""
    places = [_place(recipe, on, price) for recipe in wanted]
    known = {
        number: kept for number, place in enumerate(places) if (kept := _kept(place, wanted[number], on)) is not None
    }
    yield from known.items()
    rest = [number for number in range(len(wanted)) if number not in known]
    jobs = [PlanJob(wanted[number], on, price=price) for number in rest]
    for place, outcome in outcomes(jobs, workers):
        number = rest[place]
        if isinstance(outcome, Plan):
            with suppress(OSError):
                places[number].parent.mkdir(parents=True, exist_ok=True)
                places[number].write_text(json.dumps(_written(outcome)))
        yield number, outcome


def _written(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, without the recipe and the target, which name it."""
    found = {name: getattr(plan, name) for name in ("tier", "mesh", "parameters", "took")}
    found["memory"], found["money"] = asdict(plan.memory), asdict(plan.money) if plan.money else None
    if plan.timing:
        tally = plan.timing.tally
        collective = [[kind, list(axes), vars(entry)] for (kind, axes), entry in tally.collectives.items()]
        lines = [[part, line, seconds] for (part, line), seconds in tally.lines.items()]
        entry = vars(tally) | {"parts": dict(tally.parts), "collectives": collective, "lines": lines}
        found["timing"] = vars(plan.timing) | {"tally": entry}
    return found


def _read(recipe: Recipe, on: Target, entry: dict[str, Any]) -> Plan:
    held, timing, money = entry.pop("memory"), entry.pop("timing", None), entry.pop("money")
    memory = Memory(**held | {"largest": [Buffer(**one) for one in held["largest"]]})
    if timing:
        tally = timing["tally"]
        collective = {(kind, tuple(axes)): CollectiveCost(**values) for kind, axes, values in tally["collectives"]}
        lines = {(part, line): seconds for part, line, seconds in tally["lines"]}
        timing = Timing(**timing | {"tally": StepCost(**tally | {"collectives": collective, "lines": lines})})
    return Plan(
        recipe=recipe, target=on, memory=memory, timing=timing, money=Money(**money) if money else None, **entry
    )


def _kept(place: Path, recipe: Recipe, on: Target) -> Plan | None:
    try:
        return _read(recipe, on, json.loads(place.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # a damaged or foreign file is no plan
        return None


def _place(recipe: Recipe, on: Target, price: float | None) -> Path:
    """Where a plan is kept: under what it depends on, this program's own text and its compilers included."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    versions = {name: _version(name) for name in ("jax", "jaxlib", "libtpu")}
    key = json.dumps([plain(recipe), str(on), price, versions, code.hexdigest()], sort_keys=True, default=str)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "dtrain" / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
