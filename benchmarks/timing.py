"""Paired timing for noisy machines: variants alternate in short segments, and medians are compared."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dtrain.parallel.devices import configure_environment

if TYPE_CHECKING:
    import numpy as np

    from dtrain.assembly.assemble import Assembly

configure_environment()  # measure the program that `dtrain run` compiles


def run_step(made: "Assembly", rows: "dict[str, np.ndarray]", times: int) -> Callable[[], None]:
    """The compiled step of `dtrain run` on one batch, `times` times in a row."""
    import jax

    from dtrain.assembly.state import create_state
    from dtrain.parallel.engine import Put

    step = made.train().lower().compile()
    batch = Put(made.engine, made.layout, made.recipe.batch)(rows)
    state = [create_state(made.make, made.shapes)]

    def segment() -> None:
        for _ in range(times):
            state[0], metrics = step(state[0], batch)
        jax.block_until_ready(metrics)

    return segment


def alternate(variants: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of each variant in each round; the first round is a warm-up and is dropped."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, variant in variants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            variant()
            if turn:
                found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return found


def median_ratio(found: Mapping[str, list[tuple[float, float]]], name: str, against: str, clock: int) -> float:
    """The median over rounds of the ratio of one variant's time to another's in the same round."""
    pairs = zip(found[name], found[against], strict=True)
    return statistics.median(mine[clock] / theirs[clock] for mine, theirs in pairs)
