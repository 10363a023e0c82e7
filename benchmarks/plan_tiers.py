"""The quick tier beside the compiled one: peak memory, step, and the seconds that each plan takes.

python benchmarks/plan_tiers.py [PRESET ...]     a minute a case; the bars: 15% of the memory, quick under 2 s
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

from dtrain.plan.plan import Plan, quick
from dtrain.plan.target import target
from dtrain.plan.workers import Job, outcomes
from dtrain.recipe.load import load

RECIPE = """
model: {{kind: decoder, preset: {preset}}}
data: {{kind: tokens, files: [none.bin], length: {length}}}
optimizer: {{kind: adamw, lr: 1e-4, clip: 1.0, decay: 0.1}}
precision: {{compute: bfloat16}}
batch: {batch}
steps: 1000
mesh: {{data: 1, fsdp: -1}}
"""
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
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{preset}.yaml"
            path.write_text(RECIPE.format(preset=preset, length=length, batch=per_chip * on.chips))
            recipe = load(path)
        ahead, made = quick(recipe, on), next(outcomes([Job(recipe, on)], 1))[1]
        start = f"{preset:<13}{name:<9}{ahead.memory.peak / 1e9:7.2f} GB quick in {ahead.took:.1f} s"
        if isinstance(made, Plan) and made.timing and ahead.timing:
            step = ahead.timing.seconds / made.timing.seconds
            ratios = f"{ahead.memory.peak / made.memory.peak:5.2f}x memory {step:5.2f}x step"
            print(f"{start}  {made.memory.peak / 1e9:7.2f} GB compiled in {made.took:.0f} s  {ratios}", flush=True)
        else:
            print(start, made.message if not isinstance(made, Plan) else "does not fit", flush=True)


if __name__ == "__main__":
    main()
