"""Send measured values to the console, metrics.jsonl and the recipe's trackers."""

from collections.abc import Callable
from contextlib import ExitStack

import jax

from dtrain.core.run_dir import Folder
from dtrain.data.batch import tokens_in
from dtrain.recipe.load import plain
from dtrain.track.console import Console, eval_line
from dtrain.track.jsonl import lines
from dtrain.track.meters import Meters, peak_of
from dtrain.track.tracker import TrackedRun, guarded
from dtrain.train.assembly import Assembly
from dtrain.train.planned import PlanComparison
from dtrain.train.record import Record


def reporter(
    assembly: Assembly,
    place: Folder,
    console: Console,
    log: Record,
    stack: ExitStack,
    *,
    span: tuple[int, int],
    planned: PlanComparison | None,
) -> tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]:
    """Returns `report(step, values)`, and a function that waits until all reported values are on disk.

    Only process 0 writes. `span` has the first and the last step; `stack` closes the trackers.
    """
    recipe, steps, trackers, (start, end) = assembly.recipe, assembly.steps, [], span

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
        sync, trackers = rows.sync, [rows, *(stack.enter_context(guarded(sink, about)) for sink in recipe.track.to)]
    example = assembly.layout.example
    flops = recipe.model.flops(example, recipe.batch).step
    meters = Meters(recipe.batch, tokens_in(example), flops, peak_of(jax.devices()))

    def report(number: int, values: dict[str, float]) -> None:
        if "train/loss" in values:
            values = meters.rates(values) | (planned.values if planned else {})
            eta = (end - number) * values["time/step_ms"] / 1e3
            console.step(number, steps, values, eta)
        else:
            console.say(eval_line(number, values, recipe.model.metrics), "bold")
        for tracker in trackers:
            tracker.log(number, values)

    return report, sync
