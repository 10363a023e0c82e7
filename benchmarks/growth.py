"""How compile time and cost grow with a decoder's depth, width, context and experts, with devices, chips and processes.

Each axis grows while the others stay. Compile time is that of tracing, lowering and compiling the training step, and
cost that of a step; both are CPU seconds, the least of several, since devices are faked by one CPU. The exponent is the
slope of a straight line through the logarithms: 0 does not grow, 1 grows in proportion.

- layers are scanned, so that compile time should not grow with depth, nor with any size; cost should, in proportion;
- cost of width: the products' share is quadratic, of context: attention's share is quadratic, the rest linear;
- experts: each token uses two of them, so that only the update of their parameters should grow;
- devices share one batch on one CPU: the sum of their work should not grow, its overhead does;
- chips: a quick plan of llama3-8b on slices of v5p, seconds of planning, predicted step time at a batch per chip;
- processes: `dtrain run` of one recipe on four fake devices, command to end and time per step.

    python benchmarks/growth.py [AXIS ...]
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dtrain.parallel.devices import fake_devices

fake_devices(8)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from shapes import decoder  # noqa: E402
from timing import run_step  # noqa: E402

from dtrain.assembly.assemble import assemble  # noqa: E402
from dtrain.core.slices import target  # noqa: E402
from dtrain.parallel import compile_cache  # noqa: E402
from dtrain.plan.plan import quick  # noqa: E402
from dtrain.recipe.load import load  # noqa: E402

RECIPE = Path(__file__).parents[1] / "recipes" / "decoder-tiny.yaml"
EXPERTS = "model.experts={{count: {}, active: 2, hidden: 64}}"
AXES = {
    "layers": ("model.layers={}", (2, 4, 8, 16), 0.0, 1.0),
    "width": ("model.width={0} model.hidden={0}", (64, 128, 256, 512), 0.0, 2.0),
    "context": ("model.context={0} data.length={0}", (128, 256, 512, 1024), 0.0, 2.0),
    "experts": (EXPERTS, (4, 8, 16, 32), 0.0, 0.0),
    "devices": ("mesh={{fsdp: {}}}", (1, 2, 4, 8), 0.0, 0.0),
}
"""By axis: overrides, values, and the greatest exponents of compile time and cost that are in order."""
CHIPS = (16, 64, 256, 1024, 4096, 6144)
"""The largest slice of v5p has 6,144 chips; a pod has 8,960."""
ROUNDS, STEPS = 3, 2


def cost(overrides: list[str], devices: int) -> tuple[float, float]:
    """CPU seconds to compile the training step, and of one step."""
    recipe = load(RECIPE, ["batch=8", *overrides])
    source = recipe.data.open("train")
    made = assemble(recipe, jax.devices()[:devices], source.example, 100)
    compiling, stepping = [], []
    with compile_cache.off():
        for _ in range(ROUNDS):
            jax.clear_caches()
            start = time.process_time()
            made.engine.compile(made.train(), "cpu")
            compiling.append(time.process_time() - start)
        segment = run_step(made, source.rows(np.arange(8)), STEPS)
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        segment()
        stepping.append((time.process_time() - start) / STEPS)
    return min(compiling), min(stepping[1:])


def exponent(values: tuple[int, ...], costs: list[float]) -> float:
    """The slope of log cost over log value."""
    return float(np.polyfit(np.log(values), np.log(costs), 1)[0])


def grow(axis: str) -> None:
    overrides, values, most_compile, most_cost = AXES[axis]
    found = [cost(_words(overrides.format(value)), value if axis == "devices" else 1) for value in values]
    for value, (compiling, stepping) in zip(values, found, strict=True):
        print(f"{axis:<9}{value:>6}  compile {compiling:6.2f} s CPU  step {1e3 * stepping:9.2f} ms CPU", flush=True)
    slopes = [exponent(values, [pair[i] for pair in found]) for i in (0, 1)]
    orders = f"compile {slopes[0]:+.2f} (at most {most_compile:.0f}), step {slopes[1]:+.2f} (at most {most_cost:.0f})"
    print(f"{axis:<9}exponents: {orders}", flush=True)


def _words(text: str) -> list[str]:
    return [text] if "{" in text else text.split()


def chips() -> None:
    took = []
    for count in CHIPS:
        name = f"v5p-{2 * count}"  # named by its cores
        mesh = f"mesh={{data: -1, fsdp: {min(count, 64)}}}"
        recipe = decoder("llama3-8b", "{kind: decoder, preset: llama3-8b}", 8192, count, [mesh])
        found = quick(recipe, target(name))
        assert found.timing is not None
        took.append(found.took)
        print(f"chips    {count:>6}  plan {found.took:6.2f} s  step {1e3 * found.timing.seconds:9.0f} ms", flush=True)
    print(f"chips    exponent: plan {exponent(CHIPS, took):+.2f}", flush=True)


def processes() -> None:
    for count in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            words = ["-m", "dtrain", "run", str(RECIPE), "--devices", "4", "--processes", str(count), "steps=40"]
            start = time.perf_counter()
            subprocess.run([sys.executable, *words, "track.every=5"], cwd=folder, check=True, capture_output=True)
            seconds = time.perf_counter() - start
            rows = Path(folder, "runs", "decoder-tiny", "metrics.jsonl").read_text().splitlines()
            steps = sorted(row["time/step_ms"] for row in map(json.loads, rows) if "time/step_ms" in row)
            middle = steps[math.ceil(len(steps) / 2) - 1]
            print(f"processes{count:>6}  command {seconds:6.1f} s  step {middle:9.1f} ms", flush=True)


def main() -> None:
    others = {"chips": chips, "processes": processes}
    for axis in sys.argv[1:] or [*AXES, *others]:
        others[axis]() if axis in others else grow(axis)


if __name__ == "__main__":
    main()
