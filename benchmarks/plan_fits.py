"""What plans say of recipes near the limit of a chip's memory, and what the TPU compiler does with them.

For each model the batch is chosen so that the quick tier's peak is a given part of the memory. A quick plan that says
"fits" is wrong if the compiler refuses the program, one that says "DOES NOT FIT" if it compiles it; "may fit" claims
neither. A compiled plan must say what the compiler did.

python benchmarks/plan_fits.py [WORD ...]     a minute per case; target: no wrong plan
"""

import sys

from shapes import decoder

from dtrain.core.slices import target
from dtrain.plan.plan import Plan, quick
from dtrain.plan.report import verdict
from dtrain.plan.workers import PlanJob, outcomes

MODELS: list[tuple[str, str, int, tuple[str, ...]]] = [
    ("gpt2-1.5b", "v5e-8", 1024, ("model.remat=attention",)),
    ("llama3.2-1b", "v5e-8", 2048, ("model.remat=dots",)),
    ("qwen3-0.6b", "v6e-4", 2048, ("model.remat=attention", "engine=shard_map")),
    ("llama3-8b", "v5e-16", 2048, ()),
    ("gemma2-2b", "v5e-8", 2048, ("model.remat=attention",)),
]
PARTS = (0.8, 0.95, 1.05, 1.2)
"""The quick tier's peak over the memory of a chip that a program may use."""


def main() -> None:
    wrong = 0
    for preset, name, length, changes in MODELS:
        if sys.argv[1:] and preset not in sys.argv[1:]:
            continue
        on = target(name)
        model = f"{{kind: decoder, preset: {preset}}}"

        def ahead(rows: int) -> Plan:
            return quick(decoder(preset, model, length, rows * on.chips, changes), on)  # noqa: B023 - called at once

        small, large = ahead(2).memory, ahead(4).memory
        a_row = (large.peak - small.peak) / 2
        for part in PARTS:
            rows = max(1, round(2 + (part * small.room - small.peak) / a_row))
            estimate = ahead(rows)
            made = next(outcomes([PlanJob(estimate.recipe, on)], 1))[1]
            told = verdict(made) if isinstance(made, Plan) else made.message
            refused = isinstance(made, Plan) and bool(made.memory.refused)
            bad = verdict(estimate) != "may fit" and (verdict(estimate) == "fits") == refused
            bad |= told != ("DOES NOT FIT" if refused else "fits")
            wrong += bad
            peak = f"{made.memory.peak / 2**30:.2f}" if isinstance(made, Plan) else "-"
            sizes = (
                f"{estimate.memory.peak / 2**30:6.2f} GiB quick, {peak} compiled of {estimate.memory.room / 2**30:.2f}"
            )
            said = f"quick {verdict(estimate)}, compiled {told}{'   WRONG' * bad}"
            print(f"{preset:<12}{name:<8}{rows:>4} rows a chip: {sizes}; {said}", flush=True)
    print(f"{wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
