"""Predicted steps compared with steps that others measured and published (published_steps.yaml).

    python benchmarks/plan_vs_published.py [--compile] [--fit] [WORD ...]     only cases with a word in their line

Quick plans (a second or two each), or with --compile compiled ones for TPUs (minutes each). Of `jit` and `shard_map`,
the faster prediction counts. One constant of each family of chips (each TPU, all GPUs) may be fitted, `product` in
dtrain/core/chips.py: the fraction of the peak that matrix products reach. It was where the median of measured /
predicted of every second run of the family, the first included, was more than 10% from 1, and the errors are those of
the other half: `fit` and `shown` in the table. --fit prints the value for which that median is 1. The last lines give,
for each chip, the range of measured / predicted of all runs: `dtrain/plan/report.py` has it, and plans show it.
"""

import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from shapes import decoder

from dtrain.core.chips import Chip
from dtrain.core.slices import Target, target
from dtrain.plan.plan import Plan, quick
from dtrain.plan.workers import PlanJob, outcomes
from dtrain.recipe.recipe import Recipe

STEPS = Path(__file__).parent / "published_steps.yaml"
ENGINES = ("jit", "shard_map")
SOUGHT = [round(0.3 + 0.01 * n, 2) for n in range(66)]
"""Values of the fitted constant."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published run; the head of published_steps.yaml says what its fields are."""

    source: str
    model: str | Mapping[str, Any]
    target: str
    length: int
    rows: float
    seconds: float
    remat: Sequence[str | Sequence[str]]
    slices: int = 1
    mesh: Mapping[str, Any] = field(default_factory=dict)
    network: float | None = None
    differs: str = ""

    @property
    def place(self) -> Target:
        on = target(self.target, self.slices)
        if self.network is None or on.chip is None:
            return on
        return dataclasses.replace(on, chip=dataclasses.replace(on.chip, network_bandwidth=self.network))

    @property
    def chip(self) -> Chip:
        assert self.place.chip
        return self.place.chip

    @property
    def family(self) -> str:
        """By which its constants are fitted."""
        return self.chip.name if self.chip.platform == "tpu" else "gpu"

    @property
    def name(self) -> str:
        slices = f" x {self.slices}" if self.slices > 1 else ""
        model = self.model if isinstance(self.model, str) else f"{self.model['layers']} x {self.model['width']}"
        return f"{self.source:<27}{model:<14}{self.target + slices:<13}{self.length:>7}"

    def recipe(self, remat: str | Sequence[str], engine: str) -> Recipe:
        own = {"preset": self.model} if isinstance(self.model, str) else self.model
        model = {"kind": "decoder", "context": self.length, **own, "remat": remat}
        mesh = {"data": 1, "fsdp": -1} | self.mesh
        changes = [f"engine={engine}", f"mesh={_flow(mesh)}"]
        return decoder("published", _flow(model), self.length, round(self.rows * self.place.chips), changes)


def _flow(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()


def read() -> list[Published]:
    """The published runs."""
    return [Published(**values) for values in yaml.safe_load(STEPS.read_text())]


def plans(run: Published, compiling: bool) -> list[Plan]:
    """The plan of the faster engine for each policy that the run may have."""
    fastest = []
    for remat in run.remat:
        recipes = [run.recipe(remat, engine) for engine in ENGINES]
        if compiling and run.place.platform == "tpu":
            made = [plan for _, plan in outcomes([PlanJob(recipe, run.place) for recipe in recipes], 1)]
        else:
            made = [quick(recipe, run.place) for recipe in recipes]
        times = [plan for plan in made if isinstance(plan, Plan) and plan.timing]
        fastest += [min(times, key=_seconds)] if times else []
    return fastest


def _seconds(plan: Plan) -> float:
    assert plan.timing
    return plan.timing.seconds


def refitted(plan: Plan, old: float, new: float) -> float:
    """Seconds of a step if products reach the fraction `new` of the peak in place of `old`.

    Products and those of experts take old / new times as long; what was hidden behind them is not hidden more or less.
    """
    assert plan.timing
    return plan.timing.seconds + (old / new - 1) * plan.timing.tally.parts.get("product", 0.0)


def fitted(made: Sequence[tuple[Published, list[Plan]]], old: float) -> float:
    """The fraction of the peak for which the median of measured / predicted is nearest to 1."""

    def distance(new: float) -> float:
        ratios = [run.seconds / statistics.mean(refitted(plan, old, new) for plan in each) for run, each in made]
        return abs(statistics.median(ratios) - 1)

    return min(SOUGHT, key=distance)


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    families: dict[str, list[tuple[Published, list[Plan]]]] = defaultdict(list)
    errors: list[float] = []
    print(
        f"{'source':<27}{'model':<14}{'on':<13}{'tokens':>7}{'measured':>12}{'predicted':>11}{'ratio':>7}", flush=True
    )
    for run in read():
        if words and not any(word in run.name for word in words):
            continue
        made = plans(run, "--compile" in sys.argv)
        if not made:
            print(f"{run.name}{run.seconds:>10.2f} s  no plan has a time", flush=True)
            continue
        half = run.differs or ("shown" if len(families[run.family]) % 2 else "fit")
        families[run.family] += [] if run.differs else [(run, made)]
        seconds = statistics.mean(map(_seconds, made))
        errors += [abs(seconds / run.seconds - 1)] if half == "shown" else []
        print(f"{run.name}{run.seconds:>10.2f} s{seconds:>9.2f} s{run.seconds / seconds:>7.2f}  {half}", flush=True)
    for name, found in families.items():
        if "--fit" in sys.argv:
            now = found[0][0].chip.product
            print(f"{name}: products at {now}, fitted {fitted(found[::2], now)}", flush=True)
    everything = [one for found in families.values() for one in found]
    for name in dict.fromkeys(run.chip.name for run, _ in everything):
        ratios = [
            run.seconds / statistics.mean(map(_seconds, made)) for run, made in everything if run.chip.name == name
        ]
        counted = f"{len(ratios)} runs" if len(ratios) > 1 else "1 run"
        print(f"{name}: measured / predicted {min(ratios):.2f} to {max(ratios):.2f}, {counted}", flush=True)
    if errors:
        within = sum(error <= 0.2 for error in errors)
        print(
            f"runs that were not fitted to: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}, "
            f"{within} of {len(errors)} within 20%"
        )


if __name__ == "__main__":
    main()
