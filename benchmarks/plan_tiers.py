"""The quick tier compared with the compiled one: peak memory, step time, and the seconds that each plan takes.

python benchmarks/plan_tiers.py [PRESET ...]     a minute per case; targets: memory within 15%, quick under 2 s
"""

import sys

from shapes import decoder

from dtrain.core.slices import target
from dtrain.plan.plan import Plan, quick
from dtrain.plan.workers import PlanJob, outcomes

CASES = [
    ("gpt2-124m", "v5e-4", 1024, 8),
    ("gpt2-124m", "v5e-16", 1024, 8),
    ("gpt2-124m", "v6e-8", 1024, 16),
    ("llama3-8b", "v5e-16", 2048, 1),
    ("llama3-8b", "v5p-128", 8192, 2),
    ("llama3-8b", "v6e-64", 4096, 2),
    ("mixtral-8x7b", "v5p-128", 4096, 2),
    ("mixtral-8x7b", "v5p-64", 4096, 1),
    ("mixtral-8x7b", "v6e-256", 4096, 1),
]


def main() -> None:
    for preset, name, length, per_chip in CASES:
        if sys.argv[1:] and preset not in sys.argv[1:]:
            continue
        on = target(name)
        model = f"{{kind: decoder, preset: {preset}}}"
        recipe = decoder(preset, model, length, per_chip * on.chips)
        ahead, made = quick(recipe, on), next(outcomes([PlanJob(recipe, on)], 1))[1]
        start = f"{preset:<13}{name:<9}{ahead.memory.peak / 1e9:7.2f} GB quick in {ahead.took:.1f} s"
        if isinstance(made, Plan) and made.timing and ahead.timing:
            step = ahead.timing.seconds / made.timing.seconds
            ratios = f"{ahead.memory.peak / made.memory.peak:5.2f}x memory {step:5.2f}x step"
            print(f"{start}  {made.memory.peak / 1e9:7.2f} GB compiled in {made.took:.0f} s  {ratios}", flush=True)
        else:
            print(start, made.message if not isinstance(made, Plan) else "does not fit", flush=True)


if __name__ == "__main__":
    main()
