"""A run, read from top to bottom."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dtrain import record
from dtrain.assembly import Assembly, assemble
from dtrain.batch import Batch, tokens_in
from dtrain.checkpoint.store import Store
from dtrain.data.batches import EvalBatches, TrainBatches, stream
from dtrain.data.order import Order
from dtrain.data.source import Source
from dtrain.errors import DataError, Stopped
from dtrain.folder import Folder, folder
from dtrain.forecast import Forecast, forecast
from dtrain.introduction import introduction
from dtrain.lease import leased
from dtrain.parallel.engine import local_rows, put
from dtrain.parallel.mesh import visible
from dtrain.recipe.load import plain
from dtrain.recipe.recipe import Recipe
from dtrain.resume import compare, first_state
from dtrain.track.console import Console, eval_line, step_line
from dtrain.track.jsonl import lines
from dtrain.track.meters import Meters, peak_of
from dtrain.track.tracker import About
from dtrain.train import guard
from dtrain.train.audit import Audit
from dtrain.train.clock import Clock
from dtrain.train.hooks import Evaluation, Log, Report, Saving
from dtrain.train.interrupt import Interrupt, listening
from dtrain.train.loop import loop
from dtrain.train.state import State

DRY_STEPS = 3


@dataclass(frozen=True)
class Session:
    """What one start of a run has at hand."""

    recipe: Recipe
    place: Folder
    console: Console
    log: record.Record
    interrupt: Interrupt
    stack: ExitStack
    dry: bool
    holds: Callable[[], None]
    """Raises where this run may no longer write."""

    @property
    def clock(self) -> Clock:
        return self.log.clock


def run(
    recipe: Recipe, runs: Path, console: Console, *, allow_changes: bool = False, dry: bool = False
) -> Folder | None:
    """Train to the end, from the newest checkpoint where there is one; the run folder.

    None where the run was already finished. `dry` does a few steps, a save and a restore.
    Raises Stopped when asked to stop, after saving.
    """
    place, lead = folder(runs, recipe.name), jax.process_index() == 0
    if lead:
        place.prepare()
        console.log = place.log
    if record.finished(place, recipe):
        console.say(f"{recipe.name} is already finished: `dtrain report {place.path}` shows it", "green")
        console.say("to train anew, give the run another name: name=...")
        return None
    record.refuse_changes(place, recipe, allow_changes)
    with ExitStack() as stack:
        holds = stack.enter_context(leased(place.lease, console.warn)).holds if lead else lambda: None
        log, interrupt = (
            stack.enter_context(record.kept(place, recipe, lead)),
            stack.enter_context(listening(console.say)),
        )
        _train(Session(recipe, place, console, log, interrupt, stack, dry, holds))
    return place


def _train(on: Session) -> None:
    train, test = on.recipe.data.open("train"), on.recipe.data.open("test")
    steps, devices = on.recipe.total_steps(len(train)), jax.devices()
    unfit = on.recipe.model.mismatch(test.example)
    if unfit:
        raise DataError(f"held-out examples: {unfit}", "change the model's sizes, or the data")

    made = assemble(on.recipe, devices, train.example, steps)
    on.log.about(devices, visible(made.layout.sizes), steps)
    for line in introduction(made, train, test, steps, devices):
        on.console.say(line)
    step, evaluate = _compiled(on, made)
    foretold = forecast(on.place, made, devices)

    store = on.stack.enter_context(Store(on.place.checkpoints.absolute(), on.recipe.checkpoint, holds=on.holds))
    state, start = first_state(made, store, train, on.console, on.clock)
    on.log.committed(start)
    end = min(steps, start + DRY_STEPS) if on.dry else steps

    one_at_a_time = _pretended(devices)
    logging = Log(1 if on.dry else on.recipe.track.every, _reporter(on, made, start, end, steps, foretold), on.clock)
    held_out = partial(_eval_batches, made, test, 1 if on.dry else None)
    evaluation = Evaluation(on.recipe.evaluate, evaluate, held_out, logging, on.clock, "token" in train.example)
    saving = Saving(
        on.recipe.checkpoint.every, on.recipe.checkpoint.best, _saver(on, made, store, train), on.clock, one_at_a_time
    )

    with on.console.progress(start, steps), on.clock.rest("step"):
        on.interrupt.training = True
        logging.begin(start)
        state, stopped = loop(
            step,
            state,
            _train_batches(made, train, start, end),
            span=range(start + 1, end + 1),
            hooks=[lambda at: on.console.tick(at.step), logging, evaluation, saving],
            stop=on.interrupt.agreed,
            clock=on.clock,
            one_at_a_time=one_at_a_time,
        )
    with on.clock("save"):
        store.wait()
    on.log.committed(store.committed)
    if foretold and logging.step_ms:
        on.console.say(foretold.against(statistics.median(logging.step_ms)))
    if on.dry:
        compare(made, store, state, end, on.console)
    elif stopped and saving.saved < steps:
        raise Stopped(f"stopped at step {saving.saved}/{steps}, saved", "run the same command again to go on")


def _compiled(on: Session, made: Assembly) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """The training and the evaluation step, compiled, after a look at what the first is made of."""
    with on.clock("compile"):
        traced = made.train()
        warnings = guard.captured(traced, on.recipe.guard.constants_mb)
        warnings += guard.impure(made.train, traced) if on.recipe.guard.purity else []
        platform, engine = made.layout.platform, on.recipe.engine
        step, evaluate = (engine.compile(part, platform) for part in (traced, made.evaluate()))
    for line in warnings:
        on.console.warn(line)
    on.console.say(f"compiled in {on.clock.of('compile'):.1f} s")
    return step, evaluate


def _reporter(on: Session, made: Assembly, start: int, end: int, steps: int, foretold: Forecast | None) -> Report:
    """Where measured values go: the console, metrics.jsonl, the recipe's trackers. Process 0 alone."""
    recipe, trackers = on.recipe, []
    if jax.process_index() == 0:
        about = About(on.place, recipe.name, plain(recipe), on.log.ids, start)
        sinks = [lines(on.place.metrics, start), *(sink.open(about) for sink in recipe.track.to)]
        trackers = [on.stack.enter_context(sink) for sink in sinks]
    example = made.layout.example
    flops = recipe.model.flops(example, recipe.batch).step
    meters = Meters(recipe.batch, tokens_in(example), flops, peak_of(jax.devices()))

    def report(number: int, values: dict[str, float]) -> None:
        if "train/loss" in values:
            values = meters.rates(values) | (foretold.values if foretold else {})
            eta = (end - number) * values["time/step_ms"] / 1e3
            on.console.say(step_line(number, steps, values, eta))
        else:
            on.console.say(eval_line(number, values), "bold")
        for tracker in trackers:
            tracker.log(number, values)

    return report


def _saver(
    on: Session, made: Assembly, store: Store, train: Source
) -> Callable[[int, State, Mapping[str, float], Audit], None]:
    about = partial(record.beside, on.recipe, visible(made.layout.sizes), train)

    def save(number: int, state: State, metrics: Mapping[str, float], found: Audit) -> None:
        store.save(number, state, about(number), metrics, found.checksum)
        on.log.committed(store.committed)

    return save


def _train_batches(made: Assembly, source: Source, start: int, steps: int) -> Iterator[Batch]:
    """Batches `start` to `steps` on the devices."""
    recipe, layout = made.recipe, made.layout
    local, order = local_rows(layout, recipe.batch), Order(len(source), recipe.seed, source.starts)
    host = TrainBatches(source, order, recipe.batch, local, start, steps, recipe.data.keyed)
    return (put(recipe.engine, layout, batch, recipe.batch) for batch in stream(host, recipe.data.load))


def _eval_batches(made: Assembly, source: Source, limit: int | None) -> Iterator[Batch]:
    """Every held-out example once, on the devices; at most `limit` batches of them."""
    size, layout = made.eval_batch, made.layout
    host = EvalBatches(source, size, local_rows(layout, size))
    load = dataclasses.replace(made.recipe.data.load, workers=0)
    return (put(made.recipe.engine, layout, batch, size) for batch in itertools.islice(stream(host, load), limit))


def _pretended(devices: list[Any]) -> bool:
    return devices[0].platform == "cpu" and jax.local_device_count() > 1
