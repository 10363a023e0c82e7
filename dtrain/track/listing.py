"""One line about a run, for a list of runs."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from dtrain.core.errors import DtrainError
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.core.types import JsonObject
from dtrain.track.history import History
from dtrain.track.jsonl import damage
from dtrain.track.summary import Summary, shown, summarise
from dtrain.track.text import duration, size

DAMAGED, EMPTY, IMPORTED = "damaged", "not started", "imported"


@dataclass(frozen=True)
class Entry:
    """A run in a list."""

    name: str
    state: str
    changed: float
    """When its record or metrics were last written, in seconds since 1970."""
    bytes: int
    summary: Summary | None = None
    problem: str = ""

    @property
    def reached(self) -> int:
        """The newest known step."""
        return max(self.summary.values["step"], self.summary.history.last_step) if self.summary else 0

    @property
    def best(self) -> tuple[str, float, int] | None:
        """A metric other than the loss, if there is one, with its best value and the step of that; None if unknown."""
        found = self.summary.values["best"] if self.summary else {}
        name = next((name for name in found if not name.endswith("/loss")), next(iter(found), None))
        return (name, found[name]["value"], found[name]["step"]) if name else None

    def row(self) -> dict[str, str]:
        """The cells of a table."""
        values, best = self.summary.values if self.summary else {}, self.best
        step = f"{self.reached:,}" + (f"/{values['steps']:,}" if values.get("steps") else "") if values else ""
        declared = self.summary.declared if self.summary else ()
        return {
            "name": self.name,
            "state": self.state,
            "step": step,
            "age": duration(max(float(int(time.time() - self.changed)), 0.0)).replace(".0 s", " s"),
            "size": size(self.bytes),
            "result": self.summary.result if self.summary else "",
            "best": f"{shown(best[0], best[1], declared)} at {best[2]}" if best else "",
            "": self.problem,
        }

    def values(self) -> JsonObject:
        """The same as JSON values."""
        about = {"name": self.name, "state": self.state, "changed": self.changed, "bytes": self.bytes}
        summary = self.summary.values if self.summary else {}
        keys = ("step", "steps", "last", "best", "folder")
        return about | {key: summary[key] for key in keys if key in summary} | {"problem": self.problem}


def entry(run_dir: Folder, name: str, history: History | None = None) -> Entry:
    """Describe a run; a damaged one by its problem, with no error. `history`: what was read of it before."""
    total, changed = _extent(run_dir)
    try:
        summary = summarise(run_dir, history) if run_dir.record.exists() else None
    except (DtrainError, OSError) as error:
        problem = error.message.splitlines()[0] if isinstance(error, DtrainError) else str(error)
        return Entry(name, DAMAGED, changed, total, problem=problem)
    if summary is None and saved_steps(run_dir.checkpoints) == [0]:
        return Entry(name, IMPORTED, changed, total)
    if summary is None:
        lost = run_dir.checkpoints.is_dir() and any(run_dir.checkpoints.iterdir())
        return Entry(name, DAMAGED if lost else EMPTY, changed, total, problem="run.json is missing" if lost else "")
    damaged = summary.values["damaged_lines"]
    if damaged:
        return Entry(name, DAMAGED, changed, total, summary, f"metrics.jsonl: {damage(damaged)}")
    reason = str(summary.values["reason"] or "").partition("\n")[0] if summary.values["state"] == "failed" else ""
    return Entry(name, summary.values["state"], changed, total, summary, reason)


def _extent(run_dir: Folder) -> tuple[int, float]:
    """Bytes of all files of a run, and when its record or its metrics changed last."""
    total = 0
    for folder, _, files in os.walk(run_dir.path):
        for name in files:
            try:
                total += Path(folder, name).lstat().st_size
            except OSError:
                continue
    times = [path.stat().st_mtime for path in (run_dir.record, run_dir.metrics, run_dir.recipe) if path.exists()]
    return total, max(times, default=0.0)
