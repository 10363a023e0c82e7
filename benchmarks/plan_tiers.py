"""The quick tier compared with the compiled one: peak memory, step time, and the seconds that each plan takes.

Cases for GPUs take seconds each and need JAX's CUDA plug-in, no GPU; without it they are left out. With words, only
cases whose line has one of them.

python benchmarks/plan_tiers.py [WORD ...]     a minute per case; targets: memory within 15%, step within 20%
"""

import importlib.util
import sys

from shapes import decoder

from dtrain.core.slices import target
from dtrain.plan.plan import Plan, quick
from dtrain.plan.workers import PlanJob, outcomes

SPLIT, LORA = "engine=shard_map", "lora={rank: 16}"
CASES: list[tuple[str, str, int, float, tuple[str, ...]]] = [
    # preset, target, tokens of a row, rows of a chip, changes
    ("gpt2-124m", "v5e-4", 1024, 8, ()),
    ("gpt2-124m", "v5e-16", 1024, 8, ()),
    ("gpt2-124m", "v6e-8", 1024, 16, ()),
    ("gpt2-1.5b", "v5e-8", 1024, 8, ("model.remat=attention",)),
    ("qwen3-0.6b", "v5e-1", 1024, 8, (LORA, "accumulate=4")),
    ("llama3-8b", "v5e-16", 2048, 1, ()),
    ("llama3-8b", "v5p-128", 8192, 2, ()),
    ("llama3-8b", "v6e-64", 4096, 2, ()),
    ("llama3.1-8b", "v6e-8", 8192, 2, ()),
    ("llama3.1-8b", "v6e-64", 8192, 2, ()),
    ("llama3.1-8b", "v6e-256", 8192, 2, ()),
    ("llama3.1-8b", "v6e-256", 8192, 2, (SPLIT,)),
    ("llama3.1-8b", "v5p-128", 131072, 0.125, ("model.remat=attention", "mesh={fsdp: 8, sequence: 8}")),
    ("gemma2-9b", "v6e-16", 4096, 2, ("model.remat=attention",)),
    ("mixtral-8x7b", "v5p-128", 4096, 2, ()),
    ("mixtral-8x7b", "v5p-64", 4096, 1, ()),
    ("mixtral-8x7b", "v6e-256", 4096, 1, ()),
    *(
        (preset, on, length, rows, changes)
        for preset, on, length, rows in (
            ("gpt2-124m", "h100-8", 1024, 8),
            ("gpt2-124m", "h100-16", 1024, 8),
            ("gpt2-1.5b", "h100-8", 1024, 8),
            ("llama3.2-1b", "h100-32", 4096, 2),
            ("llama3-8b", "a100-8", 4096, 1),
            ("llama3-8b", "h100-8", 8192, 1),
            ("llama3-8b", "h100-16", 8192, 1),
            ("llama3-8b", "h100-128", 8192, 2),
            ("llama3.1-8b", "h200-16", 8192, 2),
            ("qwen3-8b", "b200-16", 4096, 2),
            ("gemma2-9b", "h100-32", 4096, 1),
            ("llama3-70b", "h100-512", 4096, 2),
            ("mixtral-8x7b", "h100-64", 4096, 1),
        )
        for changes in ((), (SPLIT,))
    ),
]


def main() -> None:
    for preset, name, length, per_chip, changes in CASES:
        on = target(name)
        case = f"{preset:<13}{name:<9}{length:>7} x {per_chip:<6g}{' '.join(changes)}"
        if sys.argv[1:] and not any(word in case for word in sys.argv[1:]):
            continue
        if on.platform == "gpu" and importlib.util.find_spec("jax_cuda13_plugin") is None:
            continue
        recipe = decoder(preset, f"{{kind: decoder, preset: {preset}}}", length, int(per_chip * on.chips), changes)
        ahead, made = quick(recipe, on), next(outcomes([PlanJob(recipe, on)], 1))[1]
        start = f"{case}: {ahead.memory.peak / 1e9:7.2f} GB quick in {ahead.took:.1f} s"
        if isinstance(made, Plan) and made.timing and ahead.timing:
            step = ahead.timing.seconds / made.timing.seconds
            ratios = f"{ahead.memory.peak / made.memory.peak:5.2f}x memory {step:5.2f}x step"
            print(f"{start}  {made.memory.peak / 1e9:7.2f} GB compiled in {made.took:.0f} s  {ratios}", flush=True)
        else:
            print(start, made.message if not isinstance(made, Plan) else "does not fit", flush=True)


if __name__ == "__main__":
    main()
