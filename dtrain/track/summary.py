"""The summary of a run, computed from its folder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtrain.core.counts import figures
from dtrain.core.errors import RecipeError
from dtrain.core.lease import in_use
from dtrain.core.metrics import Metric, higher_is_better, known, recorded
from dtrain.core.run_dir import STEP_PARTS, Folder, saved_steps, step_seconds
from dtrain.core.types import JsonObject
from dtrain.track.history import History
from dtrain.track.jsonl import damage
from dtrain.track.text import duration, epochs_text, sparkline

RUNNING, KILLED = "running", "killed"
SECTIONS = ("start", "compile", "restore", "data", *STEP_PARTS, "evaluate", "save", "profile", "locate", "finish")
"""Sections of the time of a run, in the order in which they are shown."""
NAMED = 0.01
"""Sections with a smaller part of the wall time are shown together, as "other"."""
FEWEST = 4
"""Points from which on a curve is drawn."""
LEAST = 0.003
"""The part of the wall time from which on "other" is shown."""
LONG = 600.0
"""Seconds from which on the goodput of a run that was never restarted means something."""


@dataclass(frozen=True)
class Summary:
    """The results of a run. Times are in seconds, rates per second."""

    values: JsonObject
    history: History

    @property
    def declared(self) -> tuple[Metric, ...]:
        """The metrics that the model of the run declares."""
        return recorded(self.values)

    @property
    def main_metric(self) -> tuple[str, bool | None]:
        """What `checkpoint.best` names, else the first evaluated metric that the model declares, else the loss; and
        whether higher is better."""
        last = self.values["last"]
        names = [self.values.get("main_metric") or ""]
        names += [f"eval/{metric.name}" for metric in self.declared]
        names += ["eval/bits_per_byte", "eval/perplexity", "eval/loss", "train/loss"]
        name = next((name for name in names if name in last), "")
        return name, higher_is_better(name, self.declared)

    @property
    def result(self) -> str:
        """The newest value of the main metric."""
        name, _ = self.main_metric
        return shown(name, self.values["last"][name], self.declared) if name else ""

    @property
    def best(self) -> str:
        """The best value of the main metric and its step; empty if it is not known."""
        name, _ = self.main_metric
        best = self.values["best"].get(name)
        return f"{shown(name, best['value'], self.declared)} at {best['step']}" if best else ""

    def by(self, metric: str) -> "Summary":
        """The same, with another main metric: eval/loss, or loss. RecipeError if the run has none of this name."""
        found = next((name for name in (metric, f"eval/{metric}") if name in self.values["last"]), "")
        if not found:
            has = ", ".join(name for name in self.values["last"] if name.startswith("eval/"))
            raise RecipeError(f"{self.values['name']} has no metric {metric}", f"it has {has or 'no evaluation'}")
        return replace(self, values=self.values | {"main_metric": found})

    def text(self) -> str:
        """The summary as a few lines of text."""
        values = self.values
        rows = [self._head()]
        for group in ("train", "eval"):
            names = [name for name in values["last"] if name.startswith(f"{group}/") and name.count("/") == 1]
            if names:
                rows.append(f"  {group:<6} " + "  ".join(shown(n, values["last"][n], self.declared) for n in names))
        if values["best"]:
            best = (f"{shown(n, b['value'], self.declared)} at {b['step']}" for n, b in values["best"].items())
            rows.append(f"  best   {'  '.join(best)}")
        rows += self._curves()
        if "steps_per_s" in values:
            unit = "tokens" if "tokens_per_s" in values else "examples"
            rate = f"{values['steps_per_s']:,.1f} steps/s  {values[f'{unit}_per_s']:,.0f} {unit}/s"
            rows.append(f"  speed  {rate}  median step {values['step_ms']:.2f} ms")
        for change in values["changes"]:
            rows += [f"  changed at step {change.get('step')}: {line}" for line in change.get("recipe", ())]
        rows += [*self._times(), *self._bill()]
        rows += [f"  warning: {line}" for line in (values["data"] or {}).get("overlap", ())]
        if values["damaged_lines"]:
            rows.append(f"  warning: metrics.jsonl: {damage(values['damaged_lines'])}")
        for name, curve in self.history.curves.items():
            if curve.not_finite:
                rows.append(f"  warning: {curve.not_finite:,} values of {name} are not finite")
        rows.append(f"  folder {values['folder']}")
        return "\n".join(rows)

    def _curves(self) -> list[str]:
        """The losses as lines of text; none for runs with few points."""
        rows = []
        for name in ("train/loss", "eval/loss"):
            curve = self.history.curves.get(name)
            points = [float(value) for value in curve.shown()[1]] if curve else []
            if len(points) >= FEWEST:
                label = (
                    f"{name.replace('/', ' ')} {sparkline(points, 24)} {figures(points[0])} to {figures(points[-1])}"
                )
                rows.append(f"  curve  {label}")
        return rows

    def _head(self) -> str:
        values = self.values
        if values["state"] != "finished":
            reason = "" if values["state"] in (RUNNING, KILLED) else str(values["reason"] or "").partition("\n")[0]
            of = f" of {values['steps']}" if values.get("steps") else ""
            why = f" ({reason})" if reason and not reason.startswith(("saved at step", "stopped at step")) else ""
            # a stopped run resumes from its saved step; of others the newest known step is that of the metrics
            step = values["step"] if values["state"] == "stopped" else max(values["step"], self.history.last_step)
            return f"{values['name']}: {values['state']} at step {step}{of}{why}"
        data = values["data"] or {}
        what = "rows" if "tokens_per_s" in values else "examples"
        held_out = f" on {data['test']:,} held-out {what}" if "eval/" in "".join(values["last"]) and data else ""
        share = values["step"] / values["steps"] if values["early"] and values["steps"] else 1.0
        epochs = f", {epochs_text(share * data['epochs'])} epochs" if data else ""
        result = f" with {self.result}{held_out}" if self.result else ""
        steps = f"{values['step']:,} steps{epochs}, {duration(values['wall'])}"
        early = f"; stopped early: {values['early']['reason']}" if values["early"] else ""
        return f"{values['name']}: finished{result} ({steps}){early}"

    def _times(self) -> list[str]:
        """The wall time as a sum, and what was lost to restarts."""
        values, parts = self.values, dict(self.values["parts"])
        wall = values["wall"]
        if not wall or values["state"] in (RUNNING, KILLED):  # run.json of a live run is as old as its last save
            return []
        rest = max(wall - sum(parts.values()), 0.0)
        tiny = [name for name in parts if name in SECTIONS and parts[name] < NAMED * wall]
        small = rest + sum(parts.pop(name) for name in tiny)
        texts = [f"{name.replace('_', ' ')} {_seconds(seconds, wall)}" for name, seconds in parts.items()]
        if values["compiled_from_cache"] and values["starts"] == 1:
            texts = [f"{text} (cached)" if text.startswith("compile ") else text for text in texts]
        texts += [f"other {_seconds(small, wall)}"] if small >= LEAST * wall else []
        rows = [f"  time   {duration(wall)} = {' + '.join(texts)}"]
        lost = any(name != "pause_s" for name in values["lost"])
        if values["goodput"] and (lost or wall > LONG):
            starts = f" in {values['starts']} starts" if values["starts"] > 1 else ""
            rows.append(f"  goodput {values['goodput']:.1%} of {duration(wall)}{starts}")
        return rows

    def _bill(self) -> list[str]:
        """What was planned and what was spent, and the largest differences."""
        bill = self.values["bill"]
        if not bill or self.values["state"] in (RUNNING, KILLED):
            return []
        rate = bill["dollars_hour"]
        spent, planned = (_cost(bill[name], rate) for name in ("spent_s", "planned_s"))
        most = sorted(bill["differences_s"].items(), key=lambda item: -abs(item[1]))[:4]
        why = ", ".join(f"{name} {'-' if seconds < 0 else '+'}{_cost(abs(seconds), rate)}" for name, seconds in most)
        at = f" at ${rate:,.2f} an hour" if rate else ""
        return [f"  bill   {spent} spent{at}, {planned} planned for the steps ({bill['plan']}): {why}"]


def _cost(seconds: float, rate: float | None) -> str:
    return f"${seconds / 3600 * rate:,.2f}" if rate else duration(seconds)


def _bill(record: JsonObject, times: JsonObject) -> JsonObject:
    """The time of a run beside that of its plan, whose steps alone are planned; `differences_s` adds up to what was
    spent beyond it. Empty if nothing was planned."""
    plan, parts, wall = record.get("planned"), times["parts"], times["wall"]
    if not plan or not wall or not parts:
        return {}
    planned = plan["step_s"] * (record.get("step") or 0)
    steps = sum(parts.get(name, 0.0) for name in STEP_PARTS)
    rest = {name: seconds for name, seconds in parts.items() if name not in STEP_PARTS}
    other = wall - sum(parts.values())
    return {
        "plan": f"{plan['target']}, {plan['tier']}",
        "dollars_hour": plan["dollars_hour"],
        "planned_s": planned,
        "spent_s": wall,
        "differences_s": {"steps": steps - planned} | rest | {"other": other},
    }


def _seconds(seconds: float, wall: float) -> str:
    return f"{seconds:.2f}" if wall < 10 else f"{seconds:.1f}" if wall < 60 else duration(seconds)


def state_of(run_dir: Folder, recorded: str | None) -> str | None:
    """The state of a run; one that is recorded as running but whose process is dead was killed."""
    return KILLED if recorded == RUNNING and not in_use(run_dir.lease) else recorded


def summarise(run_dir: Folder, history: History | None = None) -> Summary:
    """Summarise a run; RecipeError if the folder does not contain a run. `history`: what was read of it before."""
    record = run_dir.read_record()
    if not record:
        hint = "give the folder of a run, or its name in ./runs: `dtrain ls` lists them"
        if saved_steps(run_dir.checkpoints) == [0]:
            hint = "train it first: the recipe that `dtrain import` wrote, or the command that it named"
            raise RecipeError(f"{run_dir.path} has imported parameters, and was not trained yet", hint)
        raise RecipeError(f"{run_dir.path} is not the folder of a run: run.json is missing", hint)
    history = (history or History(run_dir.metrics)).update()
    values = {key: record.get(key) for key in ("name", "state", "reason", "exit_code", "step", "steps", "starts")}
    values |= {key: record.get(key) for key in ("seconds", "versions", "topology", "git", "started", "ended", "data")}
    values["starts"] = values["starts"] or 1
    values["state"] = state_of(run_dir, values["state"])
    values["compiled_from_cache"] = record.get("compiled_from_cache", False)
    values["main_metric"] = record.get("main_metric")
    values |= {key: record.get(key, {}) for key in ("early", "lost", "units", "higher_is_better")} | (
        times := _time(record)
    )
    values["bill"] = _bill(record, times)
    last = {name: value for name, value in history.last.items() if name.startswith(("train/", "eval/"))}
    values["changes"] = record.get("changes", [])
    values |= {"folder": str(run_dir.path), "last": last, "best": best_of(history, recorded(record))} | history.speed()
    values |= {"damaged_lines": history.damaged}
    return Summary(values, history)


def _time(record: JsonObject) -> JsonObject:
    """`parts`: where the time went, which adds up to `wall`, without pauses in which the run waited for its user.

    `goodput`: the fraction of it that was spent on steps which were not recomputed later.
    """
    lost = {key.removesuffix("_s"): seconds for key, seconds in record.get("lost", {}).items() if key != "pause_s"}
    end, start = record.get("ended") or record.get("written"), record.get("started")
    if not (end and start and end > start):
        return {"goodput": 0.0, "wall": 0.0, "parts": {}}
    wall = max(end - start - record.get("lost", {}).get("pause_s", 0.0), 1e-3)
    seconds = record.get("seconds", {})
    parts = {name: seconds[name] for name in SECTIONS if name in seconds} | lost
    rest = wall - sum(parts.values())
    return {
        "goodput": step_seconds(seconds) / wall,
        "wall": wall,
        "parts": parts | ({"unknown": rest} if rest > 0.02 * wall else {}),
    }


def best_of(history: History, declared: Sequence[Metric]) -> dict[str, dict[str, float]]:
    """The best value of each evaluation metric and its step; empty after fewer than two evaluations.

    Metrics without a known direction are left out. `declared`: those that the model declares.
    """
    best = {}
    for name, extremes in history.extremes.items() if history.evaluations > 1 else ():
        rises = higher_is_better(name, declared)
        if rises is not None:
            value, step = extremes["max" if rises else "min"]
            best[name] = {"value": value, "step": step}
    return best


def shown(name: str, value: float, declared: Sequence[Metric]) -> str:
    """A metric with its value and unit: "accuracy 98.61%"."""
    metric = known(name, declared)
    text = metric.text(value) if metric and metric.unit else figures(value)
    return f"{name.partition('/')[2]} {text}"
