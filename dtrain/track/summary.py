"""The summary of a run, from its folder alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import higher_is_better
from dtrain.core.run_dir import Folder
from dtrain.track.jsonl import damage, rows_of

SECTIONS = ("compile", "restore", "data", "step", "evaluate", "save")


@dataclass(frozen=True)
class Summary:
    """What a run came to. Times are in seconds, rates per second."""

    values: dict[str, Any]

    def text(self) -> str:
        """A few lines for a person."""
        found = self.values
        head = f"{found['name']}: {found['state']} at step {found['step']}" + (
            f" of {found['steps']}" if found.get("steps") else ""
        )
        reason = "" if found["state"] in ("running", "finished") else str(found["reason"] or "")
        rows = [head + (f" ({reason})" if reason and not reason.startswith("saved at step") else "")]
        for group in ("train", "eval"):
            shown = [_shown(name, value) for name, value in found["last"].items() if name.startswith(f"{group}/")]
            if shown:
                rows.append(f"  {group:<6} {'  '.join(shown)}")
        if found["best"]:
            rows.append(
                "  best   " + "  ".join(f"{_shown(n, b['value'])} at {b['step']}" for n, b in found["best"].items())
            )
        if "steps_per_s" in found:
            rate = f"{found['steps_per_s']:,.1f} steps/s, {found['examples_per_s']:,.0f} examples/s"
            rows.append(f"  speed  {rate}, median step {found['step_ms']:.2f} ms")
        cached = {"compile": " from the cache"} if found["compiled_from_cache"] and found["starts"] == 1 else {}
        times = [
            f"{name} {found['seconds'][name]:.1f}{cached.get(name, '')}"
            for name in SECTIONS
            if name in found["seconds"]
        ]
        if times:
            rows.append(f"  time   {'  '.join(times)}  (seconds)")
        if found["goodput"]:
            lost = [f"{name} {seconds:.1f}" for name, seconds in found["lost"].items()]
            starts = f" in {found['starts']} starts" if found["starts"] > 1 else ""
            rows.append(
                f"  goodput {found['goodput']:.1%} of {found['wall']:.1f} s{starts}  {'  '.join(lost)}".rstrip()
            )
        if found["damaged_lines"]:
            rows.append(f"  warning: metrics.jsonl: {damage(found['damaged_lines'])}")
        rows.append(f"  folder {found['folder']}")
        return "\n".join(rows)


def summarise(place: Folder) -> Summary:
    """The summary; RecipeError where the folder holds no run."""
    record = place.read_record()
    if not record:
        raise RecipeError(
            f"{place.path} holds no run: run.json is missing", "`dtrain report runs/NAME` takes a run's folder"
        )
    rows, bad = rows_of(place.metrics)
    last: dict[str, float] = {}
    for row in rows:
        last |= {name: value for name, value in row.items() if name.startswith(("train/", "eval/"))}
    values = {key: record.get(key) for key in ("name", "state", "reason", "exit_code", "step", "steps", "starts")}
    values |= {key: record.get(key) for key in ("seconds", "versions", "topology", "git", "started", "ended")}
    values["compiled_from_cache"] = record.get("compiled_from_cache", False)
    values |= {"lost": record.get("lost", {})} | _goodput(record)
    values |= {"folder": str(place.path), "last": last, "best": _best(rows, record.get("rising", {}))} | _speed(rows)
    values |= {"damaged_lines": bad}
    return Summary(values)


def _goodput(record: dict[str, Any]) -> dict[str, float]:
    """The part of all time since the first start in which steps were done that did not have to be done again."""
    end, start = record.get("ended") or record.get("written"), record.get("started")
    if not (end and start and end > start):
        return {"goodput": 0.0, "wall": 0.0}
    return {"goodput": record.get("seconds", {}).get("step", 0.0) / (end - start), "wall": end - start}


def _best(rows: list[dict[str, Any]], rising: Mapping[str, bool]) -> dict[str, dict[str, float]]:
    """The best of each evaluated metric, where there was more than one evaluation and it is known which way it is
    better. `rising`: what the model declares."""
    measured = [row for row in rows if any(name.startswith("eval/") for name in row)]
    if len(measured) < 2:
        return {}
    found = {}
    for name in (name for name in measured[0] if name.startswith("eval/")):
        up = higher_is_better(name, rising)
        known = [row for row in measured if math.isfinite(row.get(name, math.nan))]
        if known and up is not None:
            row = (max if up else min)(known, key=lambda row, name=name: row[name])
            found[name] = {"value": row[name], "step": row["step"]}
    return found


def _speed(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Rates at the median step time; the first logged interval, which warms up, is left out."""
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


def _shown(name: str, value: float) -> str:
    short = name.partition("/")[2]
    return f"{short} {value:.2%}" if short == "accuracy" else f"{short} {value:.4g}"
