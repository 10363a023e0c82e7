"""Our compiled programs beside MaxText's: peak memory of a chip and predicted step, the same cases.

MaxText's figures are the best of its default and its own tuned flags (snapshot e591f30cb, JAX 0.10.0,
libtpu 0.0.42.1), its programs read by the method that plan/replay.py follows. Ours are the variants that
searches found to be the fastest with less memory; `--search` looks for them anew. The memory is the
compiler's peak without the program's own code, as MaxText prints it.

    python benchmarks/plan_vs_maxtext.py [--search] [CASE ...]     a minute a case; the bars: less memory, no slower
"""

import json
import sys
from dataclasses import dataclass

from shapes import decoder

from dtrain.plan.plan import Plan
from dtrain.plan.search import OVERLAP, WHOLE_PRODUCTS, search
from dtrain.plan.workers import Job, outcomes
from dtrain.slices import target

SMALL = (
    "{kind: decoder, vocab: 32768, context: 4096, layers: 16, width: 2048, heads: 16, kv_heads: 8, head_dim: 128, "
    "hidden: 8192, remat: full, loss_chunks: 8}"
)


@dataclass(frozen=True)
class Case:
    """A model on a slice, and MaxText's best."""

    model: str
    target: str
    length: int
    batch: int
    gigabytes: float
    ms: float
    ours: tuple[str, ...]
    """What searches changed."""


LLAMA, MIXTRAL = "{kind: decoder, preset: llama3-8b}", "{kind: decoder, preset: mixtral-8x7b}"
BY_HAND = f"engine={{kind: shard_map, xla: {json.dumps(OVERLAP)}}}"
WHOLE = f"engine={{kind: jit, xla: {json.dumps(WHOLE_PRODUCTS)}}}"
CASES = {
    "llama3-8b": Case(LLAMA, "v5e-16", 2048, 16, 10.01, 870, ()),
    "llama3-8b-long": Case(LLAMA, "v5p-128", 8192, 128, 15.6, 3235, (BY_HAND, "model.remat=attention")),
    "1.1b": Case(SMALL, "v5e-16", 4096, 32, 2.7, 574, (WHOLE,)),
    "mixtral": Case(MIXTRAL, "v5p-128", 4096, 128, 21.1, 3552, (BY_HAND, "mesh={data: 1, fsdp: 32, tensor: 2}")),
}


def row(name: str, case: Case, label: str, plan: Plan) -> str:
    """One line: ours, MaxText's, and the ratios."""
    assert plan.timing
    memory, ms = (plan.memory.peak - plan.memory.classes["program"]) / 1e9, 1e3 * plan.timing.seconds
    ratios = f"{memory / case.gigabytes:5.2f}x memory {ms / case.ms:5.2f}x time"
    theirs = f"MaxText {case.gigabytes:5.2f} GB {case.ms:5.0f} ms"
    return f"{name:<15} {memory:6.2f} GB {ms:6.0f} ms  {theirs}  {ratios}  {label}"


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
        made = next(outcomes([Job(ours, on)], 1))[1]
        print(row(name, case, "", made) if isinstance(made, Plan) else f"{name}: {made.message}", flush=True)


if __name__ == "__main__":
    main()
