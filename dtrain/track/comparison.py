"""Several runs side by side: results, speed and time as columns, and in what their recipes differ."""

from collections.abc import Sequence
from pathlib import Path

from dtrain.core.metrics import higher_is_better
from dtrain.core.types import JsonObject
from dtrain.track.summary import Summary, shown
from dtrain.track.text import duration

MARK = "*"
"""Stands behind the best value of a row."""


def table(summaries: Sequence[Summary]) -> list[dict[str, str]]:
    """The cells by row, one column for each run. The best value of a metric has a `*`."""

    rows = [_row("state", [str(s.values["state"]) for s in summaries], summaries)]
    rows.append(_row("step", [f"{s.values['step']:,}" for s in summaries], summaries))
    for name in dict.fromkeys(name for s in summaries for name in s.values["last"] if name.count("/") == 1):
        rows.append(_metric(name, [s.values["last"].get(name) for s in summaries], summaries))
    for name in dict.fromkeys(name for s in summaries for name in s.values["best"]):
        found = [s.values["best"].get(name, {}).get("value") for s in summaries]
        rows.append(_metric(name, found, summaries, label=f"best {name}"))
    for label, key in (("steps/s", "steps_per_s"), ("examples/s", "examples_per_s"), ("tokens/s", "tokens_per_s")):
        speeds = [s.values.get(key) for s in summaries]
        if any(speeds):
            rows.append(
                _row(label, [f"{x:,.0f}" if x and x >= 100 else f"{x:,.2f}" if x else "" for x in speeds], summaries)
            )
    rows.append(
        _row("wall time", [duration(s.values["wall"]) if s.values["wall"] else "" for s in summaries], summaries)
    )
    rows.append(_row("devices", [_devices(s.values.get("topology") or {}) for s in summaries], summaries))
    return rows


def _row(label: str, cells: Sequence[str], summaries: Sequence[Summary]) -> dict[str, str]:
    return {"": label} | dict(zip(column_names(summaries), cells, strict=True))


def column_names(summaries: Sequence[Summary]) -> list[str]:
    """A name for each run: its folder's name, or the whole path where names are the same."""
    names = [Path(s.values["folder"]).name for s in summaries]
    return [s.values["folder"] if names.count(name) > 1 else name for name, s in zip(names, summaries, strict=True)]


def _metric(
    name: str, values: Sequence[float | None], summaries: Sequence[Summary], label: str = ""
) -> dict[str, str]:  # fmt: skip
    rises = higher_is_better(name, summaries[0].declared)
    known = [value for value in values if value is not None]
    best = (max if rises else min)(known) if rises is not None and len(known) > 1 and len(set(known)) > 1 else None
    texts = [
        shown(name, value, summary.declared).partition(" ")[2] if value is not None else ""
        for value, summary in zip(values, summaries, strict=True)
    ]
    marked = {text for text, value in zip(texts, values, strict=True) if value is not None and value == best}
    if len({text for text in texts if text}) == 1:
        marked = set()  # as they are printed, they do not differ
    cells = [f"{text}{MARK}" if text in marked else text for text in texts]
    return _row(label or name, cells, summaries)


def _devices(topology: JsonObject) -> str:
    if not topology:
        return ""
    mesh = " ".join(f"{axis} {size}" for axis, size in topology.get("mesh", {}).items() if size > 1)
    return f"{topology.get('devices')} {topology.get('device')}" + (f" ({mesh})" if mesh else "")


def differences(recipes: Sequence[JsonObject]) -> dict[str, list[object]]:
    """The dotted keys in which the recipes differ, with the value of each recipe; None where it is not set."""
    flat = [_flat(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for one in flat for key in one if key != "name")
    return {key: [one.get(key) for one in flat] for key in keys if len({repr(one.get(key)) for one in flat}) > 1}


def _flat(tree: JsonObject, path: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in tree.items():
        here = f"{path}.{key}" if path else str(key)
        found |= _flat(value, here) if isinstance(value, dict) and value else {here: value}
    return found
