"""Paired timing for noisy machines: variants take turns in short segments, and medians are compared."""

import statistics
import time
from collections.abc import Callable, Mapping

from dtrain.parallel.devices import settle

settle()  # what is measured is what `dtrain run` compiles


def alternate(variants: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of each variant in each round; a first round warms up and is dropped."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, variant in variants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            variant()
            if turn:
                found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return found


def median_ratio(found: Mapping[str, list[tuple[float, float]]], name: str, against: str, clock: int) -> float:
    """The median over rounds of one variant's time over another's in the same round."""
    pairs = zip(found[name], found[against], strict=True)
    return statistics.median(mine[clock] / theirs[clock] for mine, theirs in pairs)
