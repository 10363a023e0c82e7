"""Send measured values to the console, metrics.jsonl and the recipe's trackers."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax

from dtrain.assembly.assemble import Assembly
from dtrain.core.files import read_json
from dtrain.core.metrics import Metric
from dtrain.core.run_dir import Folder
from dtrain.core.types import Device, JsonObject
from dtrain.data.batch import tokens_in
from dtrain.parallel.mesh import mesh_sizes
from dtrain.recipe.load import plain
from dtrain.track.console import Console, eval_line
from dtrain.track.jsonl import Lines, lines
from dtrain.track.meters import Meters, peak_of
from dtrain.track.tracker import TrackedRun, Tracker, opened
from dtrain.train.record import Record


@dataclass(frozen=True)
class PlanComparison:
    """The step time that a plan predicted."""

    target: str
    tier: str
    """How the step time was obtained: "compiled" from the compiled program, else estimated."""
    step_ms: float
    dollars_hour: float | None = None
    """Of all chips; None without a price."""

    @property
    def record(self) -> JsonObject:
        """What run.json keeps of it."""
        return {
            "target": self.target,
            "tier": self.tier,
            "step_s": 1e-3 * self.step_ms,
            "dollars_hour": self.dollars_hour,
        }

    @property
    def values(self) -> dict[str, float]:
        """Metrics that are logged with the measured values of a step."""
        return {"plan/step_ms": self.step_ms}

    def against(self, measured_ms: float) -> str:
        """One line with the predicted and the measured step time."""
        difference = measured_ms / self.step_ms - 1
        plan = f"planned {self.step_ms:.3g} ms a step ({self.target}, {self.tier})"
        return f"{plan}, measured {measured_ms:.3g} ms: {difference:+.0%}"


def compare_with_plan(run_dir: Folder, assembly: Assembly, devices: Sequence[object]) -> PlanComparison | None:
    """The newest plan for these devices, mesh, engine and batch, preferably a compiled one; None if there is none."""
    plans = []
    for path in sorted((path for path in run_dir.plans.glob("*.json") if path.is_file()), key=_written):
        try:
            plan = read_json(path)
            if isinstance(plan, dict) and _same(plan, assembly, devices) and plan["step_seconds"] > 0:
                price = (plan.get("dollars") or {}).get("per_hour")
                named, step = (str(plan["target"]), str(plan["tier"])), 1e3 * float(plan["step_seconds"])
                plans.append(PlanComparison(*named, step, float(price) if price else None))
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            continue  # a damaged plan is ignored
    plans.sort(key=lambda plan: plan.tier == "compiled")
    return plans[-1] if plans else None


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _same(plan: JsonObject, assembly: Assembly, devices: Sequence[Device]) -> bool:
    recipe = assembly.recipe
    here = {
        "devices": len(devices),
        "mesh": mesh_sizes(assembly.layout.sizes),
        "engine": recipe.engine.kind,
        "batch": recipe.batch,
        "accumulate": recipe.accumulate,
        "compiler_options": dict(recipe.engine.xla),
    }
    kinds = plan.get("device_kinds", ())
    return all(plan.get(key) == value for key, value in here.items()) and (
        devices[0].device_kind.removeprefix("NVIDIA ") in kinds and "step_seconds" in plan
    )


class Reporter(NamedTuple):
    """Where the numbers of a run go."""

    report: Callable[[int, dict[str, float]], None]
    trackers: Sequence[Tracker]
    """Of process 0; none in others."""
    sync: Callable[[], None]
    """Waits until all reported values are on disk."""


def reporter(
    assembly: Assembly,
    run_dir: Folder,
    console: Console,
    log: Record,
    stack: ExitStack,
    *,
    span: tuple[int, int],
    planned: PlanComparison | None,
    metrics: Sequence[Metric],
) -> Reporter:
    """Only process 0 writes. `span` has the first and the last step; `stack` closes the trackers; `metrics` are the
    declared ones."""
    recipe, steps, (start, end) = assembly.recipe, assembly.steps, span
    rows: Lines | None = None
    trackers: list[Tracker] = []

    def sync() -> None:
        """Nothing is written by this process."""

    if jax.process_index() == 0:
        about = TrackedRun(
            run_dir,
            recipe.name,
            plain(recipe),
            ids=log.ids,
            start=start,
            warn=console.warn,
            metrics=tuple(metrics),
            git=log.values["git"],
        )
        rows = stack.enter_context(lines(run_dir.metrics, start, console.warn))
        sync, trackers = rows.sync, [stack.enter_context(opened(config, about)) for config in recipe.track.to]
    example = assembly.layout.example
    flops = assembly.flops.step
    meters = Meters(recipe.batch, tokens_in(example), flops, peak_of(jax.devices()))

    def report(number: int, values: dict[str, float]) -> None:
        if "train/loss" in values:
            values = meters.rates(values) | (planned.values if planned else {})
            eta = (end - number) * values["time/step_ms"] / 1e3
            console.step(number, steps, values, eta)
        else:
            console.say(eval_line(number, values, metrics), "bold")
        for tracker in [*([rows] if rows else []), *trackers]:
            tracker.log(number, values)

    return Reporter(report, trackers, sync)
