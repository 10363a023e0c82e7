"""Describe a run that starts, and send measured values to the console, metrics.jsonl and the recipe's trackers."""

from collections.abc import Callable, Iterator, Sequence
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
from dtrain.data.source import Source
from dtrain.models.nn.param import count, trained
from dtrain.parallel.mesh import PIPELINE, mesh_sizes, mesh_text
from dtrain.parallel.pipeline import bubble_text
from dtrain.parallel.rules import bytes_of, dtypes_of
from dtrain.recipe.load import plain
from dtrain.track.console import Console, eval_line
from dtrain.track.jsonl import Lines, lines
from dtrain.track.meters import Meters, peak_of
from dtrain.track.text import epochs_text
from dtrain.track.tracker import TrackedRun, Tracker, opened
from dtrain.train.record import Record


def banner(assembly: Assembly, train: Source, test: Source, steps: int, devices: list[Device]) -> Iterator[str]:
    """Describe the run that is about to start: devices, parameters, epochs, pipeline bubble, replicated parameters."""
    recipe, layout = assembly.recipe, assembly.layout
    platform, processes = devices[0].device_kind, jax.process_count()
    where = f"{len(devices)} x {platform}" + (f" in {processes} processes" if processes > 1 else "")
    yield f"{recipe.name}  on {where}  mesh {mesh_text(mesh_sizes(layout.sizes))}  engine {assembly.engine.kind}"
    size = bytes_of(layout.declared, recipe.precision.params) / 2**20
    kept = dtypes_of(layout.declared, recipe.precision.params)
    numbers = f"{layout.values:,} parameters, {size:.1f} MiB in {kept}"
    own = count(trained(layout.declared, layout.declared))
    numbers += f", {own:,} of them trained" if own < layout.values else ""
    yield f"model {recipe.model.kind}: {numbers}"
    epochs, length = steps * recipe.batch / len(train), tokens_in(train.example)
    what = f"rows of {length:,} tokens" if length else "examples"
    yield (
        f"data {recipe.data.kind}: {len(train):,} {what} to train on, {len(test):,} held out; "
        f"batch {recipe.batch} x {steps:,} steps = {epochs_text(epochs)} epochs"
    )
    for split, source in {"to train on": train, "held out": test}.items():
        yield from (f"{split}: {line}" for line in source.notes)
    stages = layout.sizes[PIPELINE]
    if stages > 1:
        yield bubble_text(stages, recipe.accumulate)
    replicated = layout.replicated()
    if replicated:
        size = sum(param.bytes(recipe.precision.params) for _, param in replicated)
        more = f" and {len(replicated) - 3} more" if len(replicated) > 3 else ""
        names = ", ".join(name for name, _ in replicated[:3]) + more
        yield f"replicated, as no mesh rule applies: {names}; {size:,} bytes on every device"


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
        "engine": assembly.engine.kind,
        "batch": recipe.batch,
        "accumulate": recipe.accumulate,
        "compiler_options": assembly.engine.chosen(
            assembly.layout.platform, assembly.layout.chip, experts=assembly.experts
        ),
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
