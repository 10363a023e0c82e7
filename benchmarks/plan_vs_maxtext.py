"""dtrain's compiled programs compared with MaxText's: peak memory of a chip and predicted step time, same cases.

MaxText's figures are those of its fastest remat policy that fits, with one fused kernel for attention's backward pass
(snapshot e591f30cb, JAX 0.10.0, libtpu 0.0.42.1), its programs timed by the method of plan/replay.py. dtrain's programs
save the results of matrix products and attention; the other settings are in each case. `--search` searches for settings
again; `--engines` plans each case with the other engine as well, with the best of dtrain's sets of options for it. The
memory is the compiler's peak without the program's own code, as MaxText prints it. `quick` is the quick
tier's step time divided by the compiled one.

    python benchmarks/plan_vs_maxtext.py [--search] [--presets] [--engines] [CASE ...]     a minute per case

Targets: no slower, fits, and quick within 20%.
"""

import json
import sys
from dataclasses import dataclass

from shapes import decoder

from dtrain.core.slices import Target, target
from dtrain.plan.plan import Plan, quick
from dtrain.plan.search import search
from dtrain.plan.variants import WHOLE_GATHERS
from dtrain.plan.workers import PlanJob, outcomes
from dtrain.recipe.recipe import Recipe

SMALL = (
    "{kind: decoder, vocab: 32768, context: 4096, layers: 16, width: 2048, heads: 16, kv_heads: 8, head_dim: 128, "
    "hidden: 8192, remat: full, loss_chunks: 8}"
)


@dataclass(frozen=True)
class Case:
    """A model on a slice, and MaxText's best result."""

    model: str
    target: str
    length: int
    batch: int
    gigabytes: float
    ms: float
    ours: tuple[str, ...]
    """Settings besides the model: remat, engine, mesh."""
    other: str
    """The other engine, with its options."""


LLAMA, MIXTRAL = "{kind: decoder, preset: llama3-8b}", "{kind: decoder, preset: mixtral-8x7b}"
BY_HAND = "engine=shard_map"
OVERLAPPED = "engine={kind: shard_map, overlap: products}"
GATHERS = f"engine={{kind: jit, xla: {json.dumps(WHOLE_GATHERS)}}}"
JIT = "engine={kind: jit, overlap: kernels}"
DOTS, ONE = "model.remat=dots", "model.loss_chunks=1"
CASES = {
    "llama3-8b": Case(LLAMA, "v5e-16", 2048, 16, 14.81, 730, (DOTS,), OVERLAPPED),
    "llama3-8b-long": Case(LLAMA, "v5p-128", 8192, 128, 60.8, 2548, (BY_HAND, DOTS, ONE), JIT),
    "1.1b": Case(SMALL, "v5e-16", 4096, 32, 8.9, 464, (GATHERS, DOTS, ONE), OVERLAPPED),
    "mixtral": Case(MIXTRAL, "v5p-128", 4096, 128, 61.1, 2923, (BY_HAND, DOTS), "engine=jit"),
}
PRESETS = {
    "gpt2-124m": ("v5e-16", 1024, 128),
    "llama3.2-1b": ("v5e-16", 4096, 32),
    "llama3-8b": ("v5e-16", 2048, 16),
}
"""Targets, lengths and batches of unchanged presets, for the quick tier only."""


def quickly(recipe: Recipe, on: Target, plan: Plan) -> str:
    """The quick tier's step time divided by the compiled one."""
    ahead = quick(recipe, on).timing
    assert plan.timing
    assert ahead
    return f"quick {ahead.seconds / plan.timing.seconds:4.2f}x"


def row(name: str, case: Case, label: str, plan: Plan) -> str:
    """One line: dtrain's figures, MaxText's, and the ratios."""
    assert plan.timing
    memory, ms = (plan.memory.peak - plan.memory.classes["program"]) / 1e9, 1e3 * plan.timing.seconds
    ratios = f"{memory / case.gigabytes:5.2f}x memory {ms / case.ms:5.2f}x time"
    theirs = f"MaxText {case.gigabytes:5.2f} GB {case.ms:5.0f} ms"
    return f"{name:<15} {memory:6.2f} GB {ms:6.0f} ms  {theirs}  {ratios}  {label}\n{'':<15} {split(plan)}"


def split(plan: Plan) -> str:
    """Where the step goes. No program of the same products and kernels takes less than the first figure."""
    assert plan.timing
    parts = {name: 1e3 * seconds for name, seconds in plan.timing.tally.parts.items()}
    least = parts.pop("product", 0.0) + parts.pop("kernel", 0.0)
    rest = ", ".join(f"{name} {ms:.0f} ms" for name, ms in parts.items() if ms >= 0.5)
    return f"products and kernels {least:.0f} ms, {rest}"


def main() -> None:
    names = [name for name in sys.argv[1:] if name in CASES] or list(CASES)
    for name in names:
        case, on = CASES[name], target(CASES[name].target)
        recipe = (name, case.model, case.length, case.batch)
        plain, ours = decoder(*recipe), decoder(*recipe, case.ours)
        if "--search" in sys.argv:
            found = search(plain, on, 12, 1, None, lambda text: print(text, file=sys.stderr))
            for candidate, plan in found.ranked[:3]:
                print(row(name, case, candidate.text, plan), flush=True)
            continue
        made = next(outcomes([PlanJob(ours, on)], 1))[1]
        text = row(name, case, quickly(ours, on, made), made) if isinstance(made, Plan) else f"{name}: {made.message}"
        print(text, flush=True)
        if "--engines" in sys.argv and isinstance(made, Plan) and made.timing:
            other = next(outcomes([PlanJob(decoder(*recipe, (*case.ours, case.other)), on)], 1))[1]
            kinds = f"{'':<15} {made.engine.kind} {1e3 * made.timing.seconds:.0f} ms"
            if isinstance(other, Plan) and other.timing:
                ratio = other.timing.seconds / made.timing.seconds
                against = f"{other.engine.kind} {1e3 * other.timing.seconds:.0f} ms, {ratio:.2f}x"
            else:
                against = f"the other engine: {'does not fit' if isinstance(other, Plan) else other.message}"
            print(f"{kinds}, {against}", flush=True)
    for preset, (place, length, batch) in PRESETS.items() if "--presets" in sys.argv else ():
        on, recipe = target(place), decoder(preset, f"{{kind: decoder, preset: {preset}}}", length, batch)
        made = next(outcomes([PlanJob(recipe, on)], 1))[1]
        print(f"{preset:<15} {quickly(recipe, on, made) if isinstance(made, Plan) else made.message}", flush=True)


if __name__ == "__main__":
    main()
