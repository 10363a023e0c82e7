"""Plans kept between searches, under all that they depend on: recipe, target, compilers, this program's text."""

import hashlib
import importlib.metadata
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dtrain.plan.plan import Plan
from dtrain.plan.target import Target
from dtrain.plan.workers import Job, Outcome, outcomes
from dtrain.recipe.load import plain
from dtrain.recipe.recipe import Recipe


def remembered(
    wanted: Sequence[Recipe], on: Target, workers: int, price: float | None
) -> Iterator[tuple[int, Outcome]]:
    """What came of each compiled plan, from the cache where it was made before."""
    places = [_place(recipe, on, price) for recipe in wanted]
    known = {number: kept for number, place in enumerate(places) if (kept := _kept(place))}
    yield from known.items()
    rest = [number for number in range(len(wanted)) if number not in known]
    jobs = [Job(wanted[number], on, price=price) for number in rest]
    for place, outcome in outcomes(jobs, workers):
        number = rest[place]
        if isinstance(outcome, Plan):
            with suppress(OSError):
                places[number].parent.mkdir(parents=True, exist_ok=True)
                places[number].write_bytes(pickle.dumps(outcome))
        yield number, outcome


def _kept(place: Path) -> Plan | None:
    try:
        return pickle.loads(place.read_bytes())
    except Exception:  # a damaged or foreign file is no plan
        return None


def _place(recipe: Recipe, on: Target, price: float | None) -> Path:
    """Where a plan is kept: under what it depends on, this program's own text and its compilers included."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    versions = {name: _version(name) for name in ("jax", "jaxlib", "libtpu")}
    key = json.dumps([plain(recipe), str(on), price, versions, code.hexdigest()], sort_keys=True, default=str)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "dtrain" / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.pickle"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
