"""What plans say of recipes near the limit of a chip's memory, and what the TPU compiler does with them.

For each recipe the batch is chosen so that the quick tier's peak is a given part of the memory. A quick plan that says
"fits" is wrong if the compiler refuses the program, one that says "DOES NOT FIT" if it compiles it; "may fit" claims
neither. A compiled plan must say what the compiler did.

python benchmarks/plan_fits.py [WORD ...]     20 programs, one to ten minutes each; target: no wrong plan
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shapes import decoder

from dtrain.core.slices import target
from dtrain.plan.plan import Plan, quick
from dtrain.plan.report import verdict
from dtrain.plan.workers import PlanJob, outcomes
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Recipe

IMAGES = """
model: {model}
data: {{kind: synthetic, image: [224, 224, 3], classes: 1000, examples: 1000000}}
optimizer: {{kind: adamw, lr: 1e-3}}
precision: {{compute: bfloat16}}
batch: {batch}
steps: 1000
mesh: {{data: 1, fsdp: -1}}
"""
VIT = "{kind: vit, image: [224, 224, 3], classes: 1000, patch: 16, layers: 12, width: 768, heads: 12, hidden: 3072}"
RESNET = (
    "{kind: cnn, image: [224, 224, 3], classes: 1000, stages: [64, 128, 256, 512], blocks: [3, 4, 6, 3], "
    "stem: imagenet}"
)

# name, model, tokens in a row (0 for images), slice, changes, examples of a chip in the two quick plans of the slope
CASES: list[tuple[str, str, int, str, tuple[str, ...], int]] = [
    ("resnet34", RESNET, 0, "v5e-4", (), 64),
    ("vit-b16", VIT, 0, "v6e-4", ("engine=shard_map",), 64),
    ("gpt2-350m", "{kind: decoder, preset: gpt2-350m}", 1024, "v5e-1", (), 2),
    ("qwen3-0.6b", "{kind: decoder, preset: qwen3-0.6b}", 2048, "v6e-4", ("engine=shard_map",), 2),
    ("llama3.2-1b", "{kind: decoder, preset: llama3.2-1b}", 2048, "v5e-8", ("model.remat=dots",), 2),
    ("gpt2-1.5b", "{kind: decoder, preset: gpt2-1.5b}", 1024, "v5e-8", ("model.remat=attention",), 2),
    ("gemma2-2b", "{kind: decoder, preset: gemma2-2b}", 2048, "v5e-8", ("model.remat=attention",), 2),
    ("llama3-8b", "{kind: decoder, preset: llama3-8b}", 2048, "v5e-16", (), 2),
    ("llama3.2-1b-tensor", "{kind: decoder, preset: llama3.2-1b}", 4096, "v6e-8", ("mesh={fsdp: 4, tensor: 2}",), 2),
    ("qwen3-0.6b-full", "{kind: decoder, preset: qwen3-0.6b}", 2048, "v5e-4", ("model.remat=full",), 2),
]
PARTS = (0.9, 1.1)
"""The quick tier's peak over the memory of a chip that a program may use."""


def recipe_of(name: str, model: str, length: int, batch: int, changes: Sequence[str]) -> Recipe:
    """The recipe of a case with that batch."""
    if length:
        return decoder(name, model, length, batch, changes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(IMAGES.format(model=model, batch=batch))
        return load(path, changes)


def main() -> None:
    wrong = 0
    for name, model, length, slice_name, changes, first in CASES:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        on = target(slice_name)

        def ahead(rows: int) -> Plan:
            return quick(recipe_of(name, model, length, rows * on.chips, changes), on)  # noqa: B023 - called at once

        small, large = ahead(first).memory, ahead(2 * first).memory
        a_row = (large.peak - small.peak) / first
        for part in PARTS:
            rows = max(1, round(first + (part * small.room - small.peak) / a_row))
            estimate = ahead(rows)
            start = time.perf_counter()
            made = next(outcomes([PlanJob(estimate.recipe, on)], 1))[1]
            took = time.perf_counter() - start
            told = verdict(made) if isinstance(made, Plan) else made.message
            refused = isinstance(made, Plan) and bool(made.memory.refused)
            bad = verdict(estimate) != "may fit" and (verdict(estimate) == "fits") == refused
            bad |= told != ("DOES NOT FIT" if refused else "fits")
            wrong += bad
            compiled = "-"
            if isinstance(made, Plan):
                compiled = f"{(made.memory.refused or made.memory.peak) / 2**30:.2f}"
            sizes = f"{estimate.memory.peak / 2**30:6.2f} GiB quick, {compiled} compiled"
            sizes += f" of {estimate.memory.room / 2**30:.2f}"
            said = f"quick {verdict(estimate)}, compiled {told}{'   WRONG' * bad}  ({took:.0f} s)"
            print(f"{name:<19}{slice_name:<8}{rows:>4} rows a chip: {sizes}; {said}", flush=True)
    print(f"{wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
