"""Predicted steps compared with steps that others measured and published; none of them was used to fit the TPUs.

    python benchmarks/plan_vs_published.py [--compile] [WORD ...]     only cases with one of the words in their line

Quick plans (a few seconds each), or with --compile compiled ones for TPUs (minutes each). Which products these runs
save is published in full for some: for the others the prediction is the middle between `remat: full`, which saves
none, and `dots`, which saves all. Of `jit` and `shard_map`, the faster prediction counts. The last lines give, for each
chip, the range of measured / predicted: `dtrain/plan/report.py` has it, and plans show it.

Sources: MaxText's page of optimized models and its README for v5e (TFLOP/s of its own count, causal attention counted
twice); Google's tpu-recipes for Trillium and Ironwood; the paper of AXLearn (2025); NVIDIA's DGX Cloud benchmarks of
25.01; torchtitan's performance pages of 2024 (A100; H100 with 500 W and slower memory).
"""

import dataclasses
import sys
from collections import defaultdict
from dataclasses import dataclass

from shapes import decoder

from dtrain.core.slices import Target, target
from dtrain.plan.plan import Plan, quick
from dtrain.plan.workers import PlanJob, outcomes
from dtrain.recipe.recipe import Recipe

OLD = "vocab: 32000, layers: 32, heads: 64, head_dim: 128, hidden: 28672"
"""MaxText's models for v5e, by `global_parameter_scale`."""


@dataclass(frozen=True)
class Published:
    """A published run: rows of `length` tokens per chip, and seconds of a step."""

    source: str
    model: str
    target: str
    length: int
    rows: float
    seconds: float
    remats: tuple[str, ...] = ("full", "dots")
    network: float | None = None
    """Bytes a second of each GPU between hosts, where the target's are others."""

    @property
    def on(self) -> Target:
        on = target(self.target)
        if self.network is None or on.chip is None:
            return on
        return dataclasses.replace(on, chip=dataclasses.replace(on.chip, network_bandwidth=self.network))

    def recipe(self, remat: str, engine: str) -> Recipe:
        own = self.model if ":" in self.model else f"preset: {self.model}"
        model = f"{{kind: decoder, {own}, context: {self.length}, remat: {remat}}}"
        return decoder("published", model, self.length, round(self.rows * self.on.chips), [f"engine={engine}"])


def per_second(tokens: float, length: int, rows: float) -> float:
    """Seconds of a step, of the tokens per second and chip."""
    return length * rows / tokens


RUNS = [
    Published("AXLearn", "llama2-7b", "v5p-512", 4096, 4, 2.5),
    Published("AXLearn", "llama2-70b", "v5p-1024", 4096, 2, 11.6),
    Published("MaxText", "llama2-70b", "v5p-1024", 4096, 4, per_second(692, 4096, 4)),
    Published("MaxText", "mixtral-8x7b", "v5p-256", 4096, 8, per_second(2909, 4096, 8)),
    Published("MaxText 16B", f"{OLD}, width: 4096", "v5e-256", 2048, 6, 10.30, ("full",)),
    Published("MaxText 32B", f"{OLD}, width: 8192", "v5e-256", 2048, 4, 12.09, ("full",)),
    Published("tpu-recipes", "llama3.1-8b", "v6e-8", 8192, 3, 3.443),
    Published("MaxText", "llama3.1-8b", "v6e-256", 8192, 3, per_second(7207, 8192, 3)),
    Published("MaxText", "llama3.1-70b", "v6e-256", 8192, 2, per_second(960, 8192, 2)),
    Published("tpu-recipes", "llama2-70b", "v6e-256", 4096, 2, 9.052),
    Published("tpu-recipes", "mistral-7b", "v6e-8", 8192, 6, 6.320),
    Published("MaxText", "mixtral-8x7b", "v6e-256", 4096, 8, per_second(3899, 4096, 8)),
    Published("tpu-recipes", "llama3.1-70b", "tpu7x-128", 8192, 4, 12.20),
    Published("tpu-recipes", "llama3.1-70b", "tpu7x-512", 8192, 4, 12.27),
    Published("AXLearn", "llama2-7b", "h100-256", 4096, 4, 1.4, network=50e9),
    Published("AXLearn", "llama2-70b", "h100-512", 4096, 2, 9.2, network=50e9),
    Published("MaxText", "llama2-70b", "h100-64", 4096, 2, per_second(1035.97, 4096, 2), network=50e9),
    Published("torchtitan", "llama3.1-8b", "h100-128", 8192, 1, per_second(6514, 8192, 1), network=50e9),
    Published("torchtitan", "llama3-8b", "h100-8", 8192, 2, per_second(6667, 8192, 2)),
    Published("torchtitan", "llama3-8b", "a100-64", 8192, 1, per_second(2973, 8192, 1), network=25e9),
]


def predicted(run: Published, compiling: bool) -> float | None:
    """Seconds of the faster engine, in the middle of the policies of remat; None if no plan has a time."""
    each = []
    for remat in run.remats:
        recipes = [run.recipe(remat, engine) for engine in ("jit", "shard_map")]
        if compiling and run.on.platform == "tpu":
            made = [plan for _, plan in outcomes([PlanJob(recipe, run.on) for recipe in recipes], 1)]
        else:
            made = [quick(recipe, run.on) for recipe in recipes]
        times = [plan.timing.seconds for plan in made if isinstance(plan, Plan) and plan.timing]
        if times:
            each.append(min(times))
    return sum(each) / len(each) if each else None


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--compile"]
    ratios: dict[str, list[float]] = defaultdict(list)
    print(f"{'source':<13}{'model':<14}{'target':<11}{'measured':>10}{'predicted':>11}{'ratio':>7}", flush=True)
    for run in RUNS:
        name = "" if ":" in run.model else run.model
        start = f"{run.source:<13}{name:<14}{run.target:<11}"
        if words and not any(word in start for word in words):
            continue
        seconds = predicted(run, "--compile" in sys.argv)
        if seconds is None:
            print(f"{start}{run.seconds:>8.2f} s  no plan has a time", flush=True)
            continue
        assert run.on.chip
        ratios[run.on.chip.name].append(run.seconds / seconds)
        print(f"{start}{run.seconds:>8.2f} s{seconds:>9.2f} s{run.seconds / seconds:>7.2f}", flush=True)
    for chip, found in ratios.items():
        print(f"{chip}: measured / predicted {min(found):.2f} to {max(found):.2f}, {len(found)} runs", flush=True)


if __name__ == "__main__":
    main()
