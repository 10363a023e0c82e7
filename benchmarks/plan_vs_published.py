"""Predicted steps compared with figures that others measured and published.

TPUs: MFU of MaxText's authors (their tiering page), against compiled plans. GPUs: tokens per second and GPU of MaxText
on 64 H100 (NVIDIA's DGX Cloud benchmarks, 25.01) and of torchtitan with FSDP (its performance pages of 2024, A100; and
H100 with 500 W and slower memory), against quick plans. Which products these runs save is not published in full: the
predictions are for `remat: full`, which saves none, and `dots`, which saves all, as if they fitted.

The batch per chip is not published with the figures; that of their recipes is used. dtrain's programs have the same
shapes, chips and lengths, with explicit collectives (`shard_map`) that overlap; with `--jit` the compiler places
them, too, and the better result is shown.

    python benchmarks/plan_vs_published.py [--jit] [CASE ...]     three minutes per case; target on TPUs: within 20%
"""

import dataclasses
import sys
from dataclasses import dataclass

from shapes import decoder

from dtrain.core.slices import target
from dtrain.parallel.jit import Jit
from dtrain.parallel.shard_map import ShardMap
from dtrain.plan.plan import Plan, quick
from dtrain.plan.variants import OVERLAP
from dtrain.plan.workers import PlanJob, outcomes


@dataclass(frozen=True)
class Case:
    """A published figure, and the batch per chip of its recipe."""

    preset: str
    target: str
    length: int
    per_chip: int
    mfu: float


CASES = {
    "llama2-70b": Case("llama2-70b", "v5p-1024", 4096, 4, 0.654),
    "llama3.1-8b": Case("llama3.1-8b", "v6e-256", 8192, 3, 0.4546),
    "llama3.1-70b": Case("llama3.1-70b", "v6e-256", 8192, 2, 0.5033),
    "mixtral-8x7b": Case("mixtral-8x7b", "v5p-256", 4096, 8, 0.5256),
}


@dataclass(frozen=True)
class Gpus:
    """A published speed of GPUs; `network`: bytes a second of each GPU between hosts, where the target's are others."""

    preset: str
    target: str
    length: int
    per_chip: int
    tokens: float
    network: float | None = None


GPUS = {
    "MaxText, 64 H100": Gpus("llama2-70b", "h100-64", 4096, 2, 1035.97, network=50e9),
    "torchtitan, 64 A100": Gpus("llama3-8b", "a100-64", 8192, 1, 2973, network=25e9),
    "torchtitan, 8 H100 of 500 W": Gpus("llama3-8b", "h100-8", 8192, 2, 6667),
}


def gpus() -> None:
    """Published and predicted tokens per second and GPU."""
    print(f"{'tokens/s/GPU':<29}{'published':>11}{'full':>9}{'dots':>9}")
    for name, case in GPUS.items():
        on = target(case.target)
        assert on.chip
        on = dataclasses.replace(
            on, chip=dataclasses.replace(on.chip, network_bandwidth=case.network or on.chip.network_bandwidth)
        )
        found = []
        for remat in ("full", "dots"):
            model = f"{{kind: decoder, preset: {case.preset}, context: {case.length}, remat: {remat}}}"
            recipe = decoder("gpus", model, case.length, case.per_chip * on.chips, ["engine=shard_map"])
            timing = quick(recipe, on).timing
            assert timing
            found.append(timing.amount / timing.seconds / on.chips)
        print(f"{name:<29}{case.tokens:>11,.0f}" + "".join(f"{each:>9,.0f}" for each in found), flush=True)


def main() -> None:
    print(
        f"{'case':<14}{'target':<11}{'length':>7}{'/chip':>7}{'published':>11}{'predicted':>11}{'ratio':>7}",
        flush=True,
    )
    chosen = [argument for argument in sys.argv[1:] if argument != "--jit"]
    kinds = (ShardMap, Jit) if "--jit" in sys.argv else (ShardMap,)
    for name, case in CASES.items():
        if chosen and name not in chosen:
            continue
        on = target(case.target)
        model = f"{{kind: decoder, preset: {case.preset}, context: {case.length}}}"
        recipe = decoder(name, model, case.length, case.per_chip * on.chips)
        engines = [kind(xla=dict(OVERLAP)) for kind in kinds]
        jobs = [PlanJob(dataclasses.replace(recipe, engine=engine), on) for engine in engines]
        made = [plan for _, plan in outcomes(jobs, 1)]
        plans = [plan for plan in made if isinstance(plan, Plan)]
        timed = sorted((plan for plan in plans if plan.timing), key=lambda plan: plan.timing.seconds)
        start = f"{name:<14}{case.target:<11}{case.length:>7}{case.per_chip:>7}{case.mfu:>11.1%}"
        if not timed:
            print(
                start, [str(plan.memory.peak) if isinstance(plan, Plan) else plan.message for plan in made], flush=True
            )
            continue
        best = timed[0]
        values = f"{best.memory.peak / 2**30:.1f} GiB, {best.timing.bound}, {best.recipe.engine.kind}"
        print(f"{start}{best.timing.mfu:>11.1%}{best.timing.mfu / case.mfu:>7.2f}  {values}", flush=True)

    if not chosen:
        gpus()


if __name__ == "__main__":
    main()
