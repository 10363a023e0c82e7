"""Overhead of dtrain's loop: steady steps of `dtrain run` compared with bare loops over the compiled step.

The MLP 784-512-256-10 at batch 128 on MNIST-shaped data in memory. `run` is the loop of a run with everything on: data
read and prefetched, batches put on the device, transfer guard, metrics logged to metrics.jsonl, log.txt and TensorBoard
every 48 steps; `logged` is the same with every step logged; `run x 32` and `logged x 32` run 32 steps in one call
(`engine.steps_per_call`). The others are bare loops over the same compiled step:

- `bare` slices a new batch from NumPy arrays for each step and puts it on the device;
- `resident` uses one batch that is already on the device, which no real training can do;
- `unwatched` is `resident` with a step that does not check whether its numbers are finite;
- `twin` is `resident` compiled again: its ratio shows how far apart two equal programs are on this machine.

The variants alternate in segments of 192 steps; the medians of the paired ratios are printed.

    python benchmarks/loop_overhead.py          target: at most 1.05x; resident to unwatched at most 1.01x;
                                                a logged step at most 0.05 ms
"""

import io
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console as Rich
from timing import alternate, median_ratio

from dtrain.assembly.assemble import Assembly, assemble
from dtrain.assembly.input import train_batches
from dtrain.assembly.state import create_state
from dtrain.core.heartbeat import HeartbeatWriter
from dtrain.core.run_dir import Folder
from dtrain.data.arrays import Arrays, image_example
from dtrain.parallel.engine import Put
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Recipe
from dtrain.track.console import Console
from dtrain.track.notifier import Notifier
from dtrain.train import start
from dtrain.train.hooks import Log
from dtrain.train.interrupt import Interrupt
from dtrain.train.loop import Calls, loop
from dtrain.train.loss_guard import LossGuard
from dtrain.train.performance_warnings import Watch
from dtrain.train.profile import Profiler
from dtrain.train.record import Record
from dtrain.train.reporting import reporter
from dtrain.train.session import Session

SEGMENT, ROUNDS, AT_ONCE = 192, 15, 32
ASKED = ["steps=1000000", "epochs=~", "track={every: 48, to: [tensorboard]}", "engine.steps_per_call=1"]
RECIPE = Path(__file__).parents[1] / "recipes" / "mlp-mnist.yaml"


def mnist_shaped() -> Arrays:
    """60,000 images of noise."""
    draw = np.random.default_rng(0)
    features = {
        "image": draw.integers(0, 256, (60_000, 28, 28, 1), np.uint8),
        "label": draw.integers(0, 10, 60_000).astype(np.int32),
    }
    return Arrays(features, image_example((28, 28, 1), 10), "noise")


def several(recipe: Recipe, source: Arrays) -> tuple[Assembly, jax.stages.Compiled]:
    """The assembly and its program of AT_ONCE steps."""
    changed = replace(recipe, engine=replace(recipe.engine, steps_per_call=AT_ONCE))
    made = assemble(changed, jax.devices()[:1], source.example, 1_000_000)
    return made, made.train().lower().compile()


def main() -> None:
    recipe = load(RECIPE, ASKED)
    source = mnist_shaped()
    made = assemble(recipe, jax.devices()[:1], source.example, 1_000_000)
    step = made.train().lower().compile()
    together = several(recipe, source)
    names = ("resident", "twin", "unwatched", "bare", "run", "logged", "run x 32", "logged x 32")
    held = {name: create_state(made.make, made.shapes) for name in names}
    resident = Put(made.engine, made.layout, 128)(source.rows(np.arange(128)))
    order = np.random.default_rng(0).permutation(60_000)

    with patch("jax.numpy.isfinite", lambda _: jnp.array(True)):
        blind = made.train().lower().compile()

    def on_one_batch(name: str, compiled: Callable[..., Any]) -> None:
        state, metrics = held[name], None
        for _ in range(SEGMENT):
            state, metrics = compiled(state, resident)
        jax.block_until_ready(metrics)
        held[name] = state

    def bare() -> None:
        state, metrics = held["bare"], None
        for number in range(SEGMENT):
            rows = order[number * 128 : number * 128 + 128]
            batch = {name: values[rows] for name, values in source.features.items()}
            state, metrics = step(state, jax.device_put(batch, jax.devices()[0]))
        jax.block_until_ready(metrics)
        held["bare"] = state

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Folder(Path(folder))
        console = Console(rich=Rich(file=io.StringIO()), log=place.log)
        stack.callback(console.close)
        heartbeat = HeartbeatWriter(place.heartbeat(0), recipe.guard.patience)
        log_of_run = Record({"git": ""}, place, lead=True)
        session = Session(
            recipe, place, console, log_of_run, heartbeat, Interrupt(print), stack, dry=False, holds=lambda: None,
            notifier=Notifier(None, place, print, 0.0),
        )  # fmt: skip
        session.clock.entered = heartbeat
        report = reporter(made, place, console, log_of_run, stack, span=(0, 1_000_000), planned=None).report

        def whole(name: str, every: int) -> Callable[[], None]:
            log = Log(every, report, session.clock)
            assembly, compiled = together if name.endswith("32") else (made, step)
            most = assembly.engine.steps_per_call
            hooks = [
                partial(start._alive, session),
                Profiler(place, step.as_text, None, session.clock, print),
                stack.enter_context(Watch(session.clock, every, 0, print)),
                LossGuard(recipe.guard, 0, lambda _step: False),
                log,
            ]
            done, forever = [0], Calls(range(1, 1_000_001), most)
            batches = train_batches(assembly, source, 0, 1_000_000, print, forever)

            def run() -> None:
                log.begin(done[0])
                # the last step of the span would save: stop one call before it, as after a signal
                held[name], _ = loop(
                    compiled,
                    held[name],
                    batches,
                    calls=Calls(range(done[0] + 1, done[0] + SEGMENT + most + 1), most),
                    hooks=hooks,
                    stop=lambda number: number == done[0] + SEGMENT,
                    used=lambda _: False,
                    clock=session.clock,
                    one_at_a_time=False,
                )
                jax.block_until_ready(held[name])
                done[0] += SEGMENT

            return run

        steps = {"resident": step, "twin": made.train().lower().compile(), "unwatched": blind}
        fixed = {name: partial(on_one_batch, name, compiled) for name, compiled in steps.items()}
        everything = {"run": recipe.track.every, "logged": 1, "run x 32": recipe.track.every, "logged x 32": 1}
        runs = {name: whole(name, every) for name, every in everything.items()}
        found = alternate({**fixed, "bare": bare, **runs}, ROUNDS)

    show(found)


def show(found: dict[str, list[tuple[float, float]]]) -> None:
    for name, times in found.items():
        wall = statistics.median(wall for wall, _ in times) / SEGMENT
        cpu = statistics.median(cpu for _, cpu in times) / SEGMENT
        print(f"{name:<11} {wall * 1e6:8.0f} us/step wall  {cpu * 1e6:8.0f} us/step CPU")
    for clock, kind in enumerate(("wall", "CPU")):
        for logged, other in (("logged", "run"), ("logged x 32", "run x 32")):
            pairs = zip(found[logged], found[other], strict=True)
            cost = statistics.median(mine[clock] - theirs[clock] for mine, theirs in pairs) / SEGMENT
            print(f"{logged}: {1e3 * cost:.3f} ms a step more {kind} than {other}")
    compared = [("run", "bare"), ("run x 32", "bare"), ("run", "resident"), ("resident", "unwatched")]
    for name, against in (*compared, ("twin", "resident")):
        wall, cpu = (median_ratio(found, name, against, clock) for clock in (0, 1))
        print(f"{name} / {against}: {wall:.3f}x wall, {cpu:.3f}x CPU")


if __name__ == "__main__":
    main()
