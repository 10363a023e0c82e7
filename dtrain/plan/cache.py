"""Cache of compiled plans. Its key covers all that a plan depends on: recipe, target, compilers, dtrain's source."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from dtrain.core.slices import Target
from dtrain.core.types import JsonObject
from dtrain.plan.memory import Buffer, Memory
from dtrain.plan.money import Money
from dtrain.plan.plan import Plan, Timing, compilers
from dtrain.plan.replay import CollectiveCost, StepCost
from dtrain.plan.workers import Outcome, PlanJob, outcomes
from dtrain.recipe.load import plain
from dtrain.recipe.recipe import Recipe


def cached_outcomes(
    recipes: Sequence[Recipe], on: Target, workers: int, price: float | None
) -> Iterator[tuple[int, Outcome]]:
    """Yield the index of each recipe with its compiled plan or error; plans are taken from the cache, or stored."""
    paths = [_cache_path(recipe, on, price) for recipe in recipes]
    known = {
        number: plan for number, path in enumerate(paths) if (plan := _load(path, recipes[number], on)) is not None
    }
    yield from known.items()
    missing = [number for number in range(len(recipes)) if number not in known]
    jobs = [PlanJob(recipes[number], on, price=price) for number in missing]
    for index, outcome in outcomes(jobs, workers):
        number = missing[index]
        if isinstance(outcome, Plan):
            with suppress(OSError):
                paths[number].parent.mkdir(parents=True, exist_ok=True)
                paths[number].write_text(json.dumps(_written(outcome)))
        yield number, outcome


def _written(plan: Plan) -> dict[str, object]:
    """The plan as JSON values, without recipe and target: both are part of the key."""
    result = {name: getattr(plan, name) for name in ("tier", "mesh", "parameters", "took", "steps", "checkpoint")}
    result["engine"] = plan.engine.kind
    result["memory"], result["money"] = asdict(plan.memory), asdict(plan.money) if plan.money else None
    if plan.timing:
        tally = plan.timing.tally
        collective = [[kind, list(axes), vars(entry)] for (kind, axes), entry in tally.collectives.items()]
        lines = [[part, line, seconds] for (part, line), seconds in tally.lines.items()]
        entry = vars(tally) | {"parts": dict(tally.parts), "collectives": collective, "lines": lines}
        result["timing"] = vars(plan.timing) | {"tally": entry}
    return result


def _read(recipe: Recipe, on: Target, entry: JsonObject) -> Plan:
    buffers, timing, money = entry.pop("memory"), entry.pop("timing", None), entry.pop("money")
    memory = Memory(**buffers | {"largest": [Buffer(**one) for one in buffers["largest"]]})
    if timing:
        tally = timing["tally"]
        collective = {(kind, tuple(axes)): CollectiveCost(**values) for kind, axes, values in tally["collectives"]}
        lines = {(part, line): seconds for part, line, seconds in tally["lines"]}
        timing = Timing(**timing | {"tally": StepCost(**tally | {"collectives": collective, "lines": lines})})
    kind = entry.pop("engine")
    return Plan(
        engine=recipe.engine.choices[kind],
        recipe=recipe,
        target=on,
        memory=memory,
        timing=timing,
        money=Money(**money) if money else None,
        **entry,
    )


def _load(path: Path, recipe: Recipe, on: Target) -> Plan | None:
    """The cached plan; None if there is none that can be read."""
    try:
        return _read(recipe, on, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # damaged, or of another version
        return None


def _cache_path(recipe: Recipe, on: Target, price: float | None) -> Path:
    """File of a plan, named by a hash of recipe, target, price, compiler versions and dtrain's source."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    key = json.dumps([plain(recipe), str(on), price, compilers(), code.hexdigest()], sort_keys=True, default=str)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "dtrain" / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
