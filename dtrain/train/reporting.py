"""Send measured values to the console, metrics.jsonl and the recipe's trackers."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import jax

from dtrain.assembly.assemble import Assembly
from dtrain.core.run_dir import Folder
from dtrain.data.batch import tokens_in
from dtrain.recipe.load import plain
from dtrain.track.console import Console, eval_line
from dtrain.track.jsonl import Lines, lines
from dtrain.track.meters import Meters, peak_of
from dtrain.track.tracker import Sample, TrackedRun, Tracker, opened
from dtrain.train.planned import PlanComparison
from dtrain.train.record import Record

SAMPLES = 50
"""Most answers that trackers get at a time; answers.jsonl has all."""


class Reporter(NamedTuple):
    """Where the numbers of a run go."""

    report: Callable[[int, dict[str, float]], None]
    samples: Callable[[int, Sequence[Sample]], None]
    sync: Callable[[], None]
    """Waits until all reported values are on disk."""


def reporter(
    assembly: Assembly,
    place: Folder,
    console: Console,
    log: Record,
    stack: ExitStack,
    *,
    span: tuple[int, int],
    planned: PlanComparison | None,
) -> Reporter:
    """Only process 0 writes. `span` has the first and the last step; `stack` closes the trackers."""
    recipe, steps, (start, end) = assembly.recipe, assembly.steps, span
    rows: Lines | None = None
    trackers: list[Tracker] = []

    def sync() -> None:
        """Nothing is written by this process."""

    if jax.process_index() == 0:
        about = TrackedRun(
            place,
            recipe.name,
            plain(recipe),
            ids=log.ids,
            start=start,
            warn=console.warn,
            metrics=tuple(recipe.model.metrics),
            git=log.values["git"],
        )
        rows = stack.enter_context(lines(place.metrics, start, console.warn))
        sync, trackers = rows.sync, [stack.enter_context(opened(config, about)) for config in recipe.track.to]
    example = assembly.layout.example
    flops = assembly.flops.step
    meters = Meters(recipe.batch, tokens_in(example), flops, peak_of(jax.devices()))

    def report(number: int, values: dict[str, float]) -> None:
        if "train/loss" in values:
            values = meters.rates(values) | (planned.values if planned else {})
            eta = (end - number) * values["time/step_ms"] / 1e3
            console.step(number, steps, values, eta)
        else:
            console.say(eval_line(number, values, recipe.model.metrics), "bold")
        for tracker in [*([rows] if rows else []), *trackers]:
            tracker.log(number, values)

    def samples(number: int, answers: Sequence[Sample]) -> None:
        for tracker in trackers:
            tracker.samples(number, answers[:SAMPLES])

    return Reporter(report, samples, sync)
