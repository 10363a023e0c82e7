"""A plan against one that was kept: what of the compiled step grew, as a budget that a user's CI holds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.assembly.explain import size_text
from dtrain.core.counts import ms
from dtrain.core.errors import DataError, RecipeError
from dtrain.core.files import read_json
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject
from dtrain.plan.report import PARTS

MAKE = "write one: dtrain plan RECIPE --on SLICE --json > FILE"
SMALLEST = 1e-3
"""Parts of a step, of its memory or of its FLOPs below this share of the whole are not compared: noise of layouts."""


@dataclass(frozen=True)
class Change:
    """A quantity of a plan in both."""

    name: str
    before: float
    now: float
    unit: str = ""
    """bytes, s, or "" for a count."""

    @property
    def ratio(self) -> float:
        """Now over before; infinite if there was none before."""
        return self.now / self.before if self.before else float("inf") if self.now else 1.0

    @property
    def text(self) -> str:
        """One line."""
        change = f"{self.ratio - 1:+.1%}" if self.before else "new"
        return f"{self.name}: {self._shown(self.before)} to {self._shown(self.now)} ({change})"

    def _shown(self, value: float) -> str:
        return {"bytes": size_text, "s": ms}.get(self.unit, lambda count: f"{count:,.4g}")(value)


@dataclass(frozen=True)
class Comparison:
    """What differs between a plan and the one that was kept."""

    source: str
    within: float
    """The share by which a quantity may grow."""
    changes: tuple[Change, ...]
    """All quantities."""
    settings: tuple[str, ...]
    """What was planned otherwise, a line each."""
    places: tuple[Change, ...] = ()
    """The lines of source code whose time grew most; no quantities, since a line moves when code above it changes."""

    @property
    def grew(self) -> list[Change]:
        """The quantities that grew by more than is allowed."""
        return [change for change in self.changes if change.ratio > 1 + self.within]

    @property
    def fell(self) -> list[Change]:
        """The quantities that fell by more than that."""
        return [change for change in self.changes if change.ratio < 1 - self.within]

    def lines(self) -> Iterator[str]:
        """The comparison as text."""
        grew, fell = self.grew, self.fell
        what = f"{len(self.changes)} quantities grew by more than {self.within:.1%} over {self.source}"
        yield f"{len(grew)} of {what}:" if grew else f"none of {what}"
        yield from (f"  {change.text}" for change in grew)
        if fell:
            yield f"{len(fell)} fell:"
            yield from (f"  {change.text}" for change in fell)
        if grew and self.places:
            yield "lines whose time grew most:"
            yield from (f"  {change.text}" for change in self.places)
        if (grew or fell) and self.settings:
            yield "planned otherwise:"
            yield from (f"  {line}" for line in self.settings)

    def values(self) -> JsonObject:
        """The comparison as JSON values."""
        groups = {"grew": self.grew, "fell": self.fell, "lines": self.places}
        named = {key: [vars(change) for change in changes] for key, changes in groups.items()}
        return {"source": self.source, "within": self.within, "settings": list(self.settings), **named}


def kept_plan(given: str, run: Folder, plan: str) -> tuple[str, JsonObject]:
    """The plan that was kept, and where: of a file of `dtrain plan --json`, or of a run.

    `run` is the run of that name; `plan` is the name of its file for the target in question. DataError if there is
    none, or if it cannot be read.
    """
    path = Path(given)
    path = path if path.is_file() else run.plans / plan
    if not path.is_file():
        there = ", ".join(sorted(one.stem for one in run.plans.glob("*.json"))) if run.plans.is_dir() else ""
        hint = f"the run has plans for {there}" if there else MAKE
        raise DataError(f"--against {given}: no such file, and no run with a plan {plan}", hint)
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"--against {path}: cannot be read: {error}", "write it again by dtrain plan --json") from error
    if not isinstance(values, dict) or not isinstance(values.get("memory_bytes"), dict) or "tier" not in values:
        raise DataError(
            f"--against {path}: is no plan of one target", "write one: dtrain plan RECIPE --on SLICE --json"
        )
    return str(path), values


def compared(source: str, before: JsonObject, now: JsonObject, within: float) -> Comparison:
    """Compare a plan with one that was kept, both as JSON values.

    RecipeError if they are for other hardware, or if one is compiled and the other is not.
    """
    for key, what in {"target": "target", "slices": "number of slices", "tier": "tier"}.items():
        if before.get(key) != now[key]:
            message = f"--against {source}: its {what} is {before.get(key)}, this plan's {now[key]}"
            raise RecipeError(message, "compare plans of equal hardware, both compiled or both --quick")
    try:
        old, new, places = _quantities(before), _quantities(now), tuple(_places(before, now))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        hint = "write it again by dtrain plan --json"
        raise DataError(f"--against {source}: its values are not those of a plan ({error})", hint) from error
    names = dict.fromkeys([*old, *new])
    changes = [
        Change(name, old.get(name, (0.0, ""))[0], new.get(name, (0.0, ""))[0], (new | old)[name][1]) for name in names
    ]
    return Comparison(source, within, tuple(_large(changes)), tuple(_settings(before, now)), places)


def _quantities(plan: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """What is compared, by name: value and unit."""
    memory = plan["memory_bytes"]
    found: dict[str, tuple[float, str]] = {PEAK: (float(memory["peak"]), "bytes")}
    for name, size in memory.items():
        if name not in ("peak", "reserved", "needed", "room"):
            found[f"memory of {name}"] = float(size), "bytes"
    if "step_seconds" not in plan:
        return found
    found[STEP] = float(plan["step_seconds"]), "s"
    found |= {f"time of {PARTS[part]}": (float(value), "s") for part, value in plan["seconds_by_part"].items()}
    found |= {f"FLOPs of {name}": (float(value), "") for name, value in plan["flops_per_device"].items()}
    found["memory traffic"] = float(plan["memory_traffic_bytes_per_device"]), "bytes"
    for one in plan["network"]:
        over = f"{one['kind']} over {' and '.join(one['axes']) or 'all'}"
        for key, unit in (("calls", ""), ("bytes", "bytes"), ("exposed", "s")):
            name = f"{over}: {key}"
            found[name] = found.get(name, (0.0, unit))[0] + float(one[key]), unit
    return found


def _places(before: JsonObject, now: JsonObject) -> list[Change]:
    """The lines of source code whose time grew most, if both plans have them."""
    if "seconds_by_line" not in before or "seconds_by_line" not in now:
        return []
    old, new = (
        {f"{PARTS[one['part']]} of {one['line']}": float(one["seconds"]) for one in plan["seconds_by_line"]}
        for plan in (before, now)
    )
    grew = [Change(name, old.get(name, 0.0), value, "s") for name, value in new.items()]
    grew = [change for change in grew if change.now - change.before > SMALLEST * now["step_seconds"]]
    return sorted(grew, key=lambda change: change.before - change.now)[:PLACES]


PLACES = 5
"""Most lines of source code that are named."""
PEAK, STEP = "peak memory", "step time"


def _large(changes: list[Change]) -> Iterator[Change]:
    """Without what is a small share of the whole in both plans; collectives are all compared."""
    whole = {change.name: max(change.before, change.now) for change in changes}
    flops = max((value for name, value in whole.items() if name.startswith("FLOPs")), default=0.0)
    for change in changes:
        of = {"memory of": whole[PEAK], "time of": whole.get(STEP, 0.0), "FLOPs of": flops}
        limit = next((SMALLEST * most for start, most in of.items() if change.name.startswith(start)), 0.0)
        if change.name.endswith(": exposed"):
            limit = SMALLEST * whole.get(STEP, 0.0)
        if max(change.before, change.now) > limit:
            yield change


def _settings(before: JsonObject, now: JsonObject) -> Iterator[str]:
    """What was planned otherwise: sizes, settings, versions."""
    for key in ("mesh", "engine", "batch", "accumulate", "compiler_options", "parameters", "versions"):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            for name in dict.fromkeys([*old, *new]):
                if old.get(name) != new.get(name):
                    yield f"{key}.{name}: {old.get(name)} to {new.get(name)}"
        elif old != new:
            yield f"{key}: {old} to {new}"
