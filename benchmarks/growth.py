"""How the time of compiling a decoder, and of its step, grows with its sizes; what plans say of 16 to 6,144 chips.

One size at a time is made larger. The exponent is the slope between the smallest and the largest in logarithms: 0 does
not grow, 1 is proportional. Layers are a loop in the program, so compiling must not grow with them (`unroll` would);
a step must grow at most as its arithmetic does: linearly with layers and tokens, with the square of the width. With
experts, of which each token uses two, neither grows with their number but by the optimizer's work on their parameters.
Compiling for more devices (`fsdp`, fake ones on this CPU) must not grow with them.

    python benchmarks/growth.py        target: no exponent above its limit
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

BASE = {"layers": 4, "width": 256, "context": 128, "experts": 0, "devices": 1}
GROWTH = {  # sizes, limit of the exponent of compiling, of the step; None: not judged
    "layers": ((2, 8, 32), 0.25, 1.15),
    "width": ((64, 256, 1024), 0.25, 2.0),
    "context": ((128, 512, 2048), 0.25, 2.0),
    "experts": ((4, 16, 64), 0.25, 0.75),
    "devices": ((1, 2, 4, 8), 0.5, None),
}
CHIPS = ("v5p-32", "v5p-128", "v5p-1024", "v5p-6144", "v5p-12288")
"""Slices by their names, which count two cores for each chip."""
TIMES = 3


def one(sizes: dict[str, int]) -> None:
    """Compile and run the step of a decoder of these sizes; prints the CPU seconds of both."""
    import timing  # noqa: F401 - configures JAX as `dtrain run` does, before it starts
    from timing import run_step

    from dtrain.data.windows import row_example
    from dtrain.parallel.devices import fake_devices
    from dtrain.recipe.load import load
    from dtrain.train.assembly import assemble

    fake_devices(sizes["devices"])
    import jax

    width, context = sizes["width"], sizes["context"]
    model = [f"model.layers={sizes['layers']}", f"model.width={width}", "model.heads=4", "model.kv_heads=4"]
    model += [f"model.hidden={4 * width}", f"model.context={context}", f"data.length={context}", "batch=8"]
    model += [f"mesh={{fsdp: {sizes['devices']}}}"]
    if sizes["experts"]:
        model += [f"model.experts={{count: {sizes['experts']}, active: 2, hidden: {width}}}", "model.hidden=null"]
    recipe = load("recipes/decoder-tiny.yaml", model)
    made = assemble(recipe, jax.devices(), row_example(context, packed=False), 1000)
    tokens = np.random.default_rng(0).integers(0, 256, (8, context + 1)).astype(np.int32)
    start = time.process_time()
    made.train().lower().compile()
    compiled = time.process_time() - start
    segment = run_step(made, {"token": tokens[:, :-1], "target": tokens[:, 1:]}, 1)
    segment()
    steps = []
    for _ in range(5):
        start = time.process_time()
        segment()
        steps.append(time.process_time() - start)
    print(json.dumps([compiled, statistics.median(steps)]))


def measured(sizes: dict[str, int]) -> list[float]:
    """Medians of (compile, step) over processes of their own, without JAX's compilation cache."""
    command = [sys.executable, __file__, json.dumps(sizes)]
    root = Path(__file__).parents[1]
    outputs = [subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True).stdout for _ in range(TIMES)]
    return [statistics.median(values) for values in zip(*map(json.loads, outputs), strict=True)]


def plans() -> None:
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        for slice_ in CHIPS:
            chips = int(slice_.partition("-")[2]) // 2
            command = [sys.executable, "-m", "dtrain", "plan", str(root / "recipes/llama3-8b-pretrain-v5p-128.yaml")]
            command += [f"mesh={{fsdp: {chips}}}", f"batch={2 * chips}", "--on", slice_, "--json"]
            start = time.perf_counter()
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - start
            if done.returncode:
                print(f"{slice_:<10} {chips:>6,} chips   exit code {done.returncode}: {done.stderr.strip()[-200:]}")
                continue
            print(f"{slice_:<10} {chips:>6,} chips   planned in {seconds:5.1f} s   {summary(json.loads(done.stdout))}")


def summary(plan: dict[str, Any]) -> str:
    return f"step {1e3 * plan['step_seconds']:,.0f} ms, MFU {plan['mfu']:.1%}, {plan['verdict']}"


def main() -> int:
    missed = False
    for name, (values, *limits) in GROWTH.items():
        found = [measured(BASE | {name: value}) for value in values]
        for part, kind, limit in zip(zip(*found, strict=True), ("compiling", "step"), limits, strict=True):
            if limit is None:
                continue
            slope = math.log(part[-1] / part[0]) / math.log(values[-1] / values[0])
            shown = "  ".join(f"{value}: {seconds:.3g} s" for value, seconds in zip(values, part, strict=True))
            missed |= slope > limit
            print(f"{name:<8} {kind:<10} {shown}   exponent {slope:.2f}, limit {limit}", flush=True)
    plans()
    return int(missed)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one(json.loads(sys.argv[1]))
    else:
        sys.exit(main())
