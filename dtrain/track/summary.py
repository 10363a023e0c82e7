"""The summary of a run, computed from its folder."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import Metric, higher_is_better, known, recorded
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject
from dtrain.track.jsonl import damage, rows_of

SECTIONS = ("compile", "restore", "data", "step", "evaluate", "save")


@dataclass(frozen=True)
class Summary:
    """The results of a run. Times are in seconds, rates per second."""

    values: JsonObject

    def text(self) -> str:
        """The summary as a few lines of text."""
        values, declared = self.values, recorded(self.values)
        head = f"{values['name']}: {values['state']} at step {values['step']}" + (
            f" of {values['steps']}" if values.get("steps") else ""
        )
        reason = "" if values["state"] in ("running", "finished") else str(values["reason"] or "")
        rows = [head + (f" ({reason})" if reason and not reason.startswith("saved at step") else "")]
        for group in ("train", "eval"):
            shown = [
                _shown(name, value, declared) for name, value in values["last"].items() if name.startswith(f"{group}/")
            ]
            if shown:
                rows.append(f"  {group:<6} {'  '.join(shown)}")
        if values["best"]:
            rows.append(
                "  best   "
                + "  ".join(f"{_shown(n, b['value'], declared)} at {b['step']}" for n, b in values["best"].items())
            )
        if "steps_per_s" in values:
            rate = f"{values['steps_per_s']:,.1f} steps/s, {values['examples_per_s']:,.0f} examples/s"
            rows.append(f"  speed  {rate}, median step {values['step_ms']:.2f} ms")
        cached = {"compile": " from the cache"} if values["compiled_from_cache"] and values["starts"] == 1 else {}
        times = [
            f"{name} {values['seconds'][name]:.1f}{cached.get(name, '')}"
            for name in SECTIONS
            if name in values["seconds"]
        ]
        if times:
            rows.append(f"  time   {'  '.join(times)}  (seconds)")
        if values["goodput"]:
            causes = {key.removesuffix("_s").replace("_", " "): seconds for key, seconds in values["lost"].items()}
            lost = [f"{cause} {seconds:.1f}" for cause, seconds in causes.items()]
            starts = f" in {values['starts']} starts" if values["starts"] > 1 else ""
            rows.append(
                f"  goodput {values['goodput']:.1%} of {values['wall']:.1f} s{starts}  {'  '.join(lost)}".rstrip()
            )
        if values["damaged_lines"]:
            rows.append(f"  warning: metrics.jsonl: {damage(values['damaged_lines'])}")
        rows.append(f"  folder {values['folder']}")
        return "\n".join(rows)


def summarise(place: Folder) -> Summary:
    """Summarise a run; RecipeError if the folder does not contain a run."""
    record = place.read_record()
    if not record:
        hint = "give the folder of a run: `dtrain report runs/NAME`"
        raise RecipeError(f"{place.path} is not the folder of a run: run.json is missing", hint)
    rows, bad = rows_of(place.metrics)
    last: dict[str, float] = {}
    for row in rows:
        last |= {name: value for name, value in row.items() if name.startswith(("train/", "eval/"))}
    values = {key: record.get(key) for key in ("name", "state", "reason", "exit_code", "step", "steps", "starts")}
    values |= {key: record.get(key) for key in ("seconds", "versions", "topology", "git", "started", "ended")}
    values["compiled_from_cache"] = record.get("compiled_from_cache", False)
    values |= {"lost": record.get("lost", {}), "units": record.get("units", {})} | _goodput(record)
    values |= {"folder": str(place.path), "last": last, "best": _best(rows, recorded(record))} | _speed(rows)
    values |= {"damaged_lines": bad}
    return Summary(values)


def _goodput(record: JsonObject) -> dict[str, float]:
    """Goodput: the fraction of the wall time since the first start that was spent on steps not recomputed later."""
    end, start = record.get("ended") or record.get("written"), record.get("started")
    if not (end and start and end > start):
        return {"goodput": 0.0, "wall": 0.0}
    return {"goodput": record.get("seconds", {}).get("step", 0.0) / (end - start), "wall": end - start}


def _best(rows: list[JsonObject], declared: Sequence[Metric]) -> dict[str, dict[str, float]]:
    """The best value of each evaluation metric and its step; empty after fewer than two evaluations.

    Metrics without a known direction are left out. `declared`: those that the model declares.
    """
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    if len(evaluations) < 2:
        return {}
    best = {}
    for name in (name for name in evaluations[0] if name.startswith("eval/")):
        rises = higher_is_better(name, declared)
        finite = [row for row in evaluations if math.isfinite(row.get(name, math.nan))]
        if finite and rises is not None:
            row = (max if rises else min)(finite, key=lambda row, name=name: row[name])
            best[name] = {"value": row[name], "step": row["step"]}
    return best


def _speed(rows: list[JsonObject]) -> dict[str, float]:
    """Rates at the median step time, without the first logged interval, which includes the warm-up."""
    timed = sorted(
        (row for row in rows if {"time/step_ms", "rate/examples_per_s"} <= row.keys()), key=lambda row: row["step"]
    )
    timed = sorted(timed[1:] or timed, key=lambda row: row["time/step_ms"])
    if not timed:
        return {}
    row = timed[len(timed) // 2]
    milliseconds = max(row["time/step_ms"], 1e-6)
    return {
        "step_ms": milliseconds,
        "steps_per_s": 1e3 / milliseconds,
        "examples_per_s": row["rate/examples_per_s"],
    }


def _shown(name: str, value: float, declared: Sequence[Metric]) -> str:
    metric = known(name, declared)
    text = metric.text(value) if metric and metric.unit else f"{value:.4g}"  # four digits, also of small numbers
    return f"{name.partition('/')[2]} {text}"
