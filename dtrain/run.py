"""A run, read from top to bottom."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dtrain import faults, record
from dtrain.assembly import Assembly, assemble
from dtrain.batch import tokens_in
from dtrain.beat import Beat
from dtrain.checkpoint.store import Store
from dtrain.data.source import Source
from dtrain.errors import DataError, NotFinite, Stopped
from dtrain.feed import eval_batches, train_batches
from dtrain.folder import Folder, folder
from dtrain.forecast import Forecast, forecast
from dtrain.identity import finished, refuse_changes
from dtrain.introduction import introduction
from dtrain.lease import leased
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
from dtrain.train.loop import Moment, loop
from dtrain.train.state import State
from dtrain.train.watch import RolledBack, Watch

DRY_STEPS = 3


@dataclass(frozen=True)
class Session:
    """What one start of a run has at hand."""

    recipe: Recipe
    place: Folder
    console: Console
    log: record.Record
    beat: Beat
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
    if finished(place, recipe):
        console.say(f"{recipe.name} is already finished: `dtrain report {place.path}` shows it", "green")
        console.say("to train anew, give the run another name: name=...")
        return None
    refuse_changes(place, recipe, allow_changes)
    with ExitStack() as stack:
        holds = stack.enter_context(leased(place.lease, console.warn)).holds if lead else lambda: None
        log = stack.enter_context(record.kept(place, recipe, lead))
        beat = stack.enter_context(closing(Beat(place.beat(jax.process_index()), recipe.guard.patience)))
        log.clock.entered = beat
        interrupt = stack.enter_context(listening(console.say, lambda: log.end("aborted", "left at once", 130)))
        _train(Session(recipe, place, console, log, beat, interrupt, stack, dry, holds))
    return place


@dataclass(frozen=True)
class Ready:
    """What does not change however often the run goes back."""

    made: Assembly
    train: Source
    test: Source
    step: jax.stages.Compiled
    evaluate: jax.stages.Compiled
    store: Store
    foretold: Forecast | None


def _train(on: Session) -> None:
    ready = _ready(on)
    while True:
        with ExitStack() as stack:
            spoiled = _attempt(dataclasses.replace(on, stack=stack), ready)
        if spoiled is None:
            return
        on.log.went_back(spoiled, on.recipe.guard.budget)
        on.console.warn(f"{spoiled.message}: going back to the newest checkpoint, over the batches since")


def _ready(on: Session) -> Ready:
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
    store = on.stack.enter_context(Store(on.place.checkpoints.absolute(), on.recipe.checkpoint, holds=on.holds))
    store.refuse_without_room(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made.shapes)))
    return Ready(made, train, test, step, evaluate, store, forecast(on.place, made, devices))


def _attempt(on: Session, ready: Ready) -> RolledBack | None:
    """From the newest checkpoint to the end, or to a step that it is better to go back from."""
    made, store, steps = ready.made, ready.store, ready.made.steps
    state, start = first_state(made, store, ready.train, on.console, on.clock, on.log.reached, on.log.next_batch)
    on.log.resumed(start.step, start.step_s)
    end = min(steps, start.step + DRY_STEPS) if on.dry else steps

    pretended, skipping = _pretended(jax.devices()), on.recipe.guard.not_finite == "skip"
    report = _reporter(on, made, start.step, end, ready.foretold)
    logging = Log(1 if on.dry else on.recipe.track.every, report, on.clock, skipping)
    held_out = partial(eval_batches, made, ready.test, 1 if on.dry else None)
    evaluation = Evaluation(
        on.recipe.evaluate, ready.evaluate, held_out, logging, on.clock, "token" in ready.train.example
    )
    watch = Watch(on.recipe.guard, start.passed, lambda step: saving.due(step) or evaluation.due(step))
    watch.recall(start.seen)
    save, often = _saver(on, ready, start.passed, evaluation.due, watch), on.recipe.checkpoint
    saving = Saving(often.every, often.best, save, on.clock, pretended, skipping, logging.flush)

    on.interrupt.training, span = True, (start.step + start.passed, end + start.passed)
    try:
        with on.console.progress(start.step, steps), on.clock.rest("step"):
            logging.begin(start.step)
            if start.owed:
                store.note(start.step, evaluation.measure(start.step, state))
            state, stopped = loop(
                ready.step,
                state,
                on.stack.enter_context(closing(train_batches(made, ready.train, *span, on.console.warn))),
                span=range(start.step + 1, end + 1),
                hooks=[partial(_alive, on), watch, logging, evaluation, saving],
                stop=on.interrupt.agreed,
                clock=on.clock,
                one_at_a_time=pretended,
            )
    except RolledBack as spoiled:
        with on.clock("save"), suppress(NotFinite):  # of a save that is not to be kept either
            store.wait()
        return spoiled.with_traceback(None)  # whose frames would keep the state in memory
    with on.clock("save"):
        store.wait()
    on.log.committed(store.committed)
    if ready.foretold and logging.step_ms:
        on.console.say(ready.foretold.against(statistics.median(logging.step_ms)))
    if on.dry:
        compare(made, store, state, end, on.console)
    elif stopped and saving.saved < steps:
        raise Stopped(f"stopped at step {saving.saved}/{steps}, saved", "run the same command again to go on")
    return None


def _alive(on: Session, at: Moment) -> None:
    on.console.tick(at.step)
    on.beat.step = at.step
    on.beat("step")
    faults.strike(f"step:{at.step}", jax.process_index())


def _compiled(on: Session, made: Assembly) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """The training and the evaluation step, compiled, after a look at what the first is made of."""
    with on.clock("compile"):
        faults.strike("compile", jax.process_index())
        traced = made.train()
        warnings = guard.captured(traced, on.recipe.guard.constants_mb)
        warnings += guard.impure(made.train, traced) if on.recipe.guard.purity else []
        platform, engine = made.layout.platform, on.recipe.engine
        step, evaluate = (engine.compile(part, platform) for part in (traced, made.evaluate()))
    for line in warnings:
        on.console.warn(line)
    on.console.say(f"compiled in {on.clock.of('compile'):.1f} s")
    return step, evaluate


def _reporter(on: Session, made: Assembly, start: int, end: int, foretold: Forecast | None) -> Report:
    """Where measured values go: the console, metrics.jsonl, the recipe's trackers. Process 0 alone."""
    recipe, steps, trackers = on.recipe, made.steps, []
    if jax.process_index() == 0:
        about = About(on.place, recipe.name, plain(recipe), on.log.ids, start, on.console.warn)
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
    on: Session, ready: Ready, passed: int, due: Callable[[int], bool], watch: Watch
) -> Callable[[int, State, Mapping[str, float], Audit], None]:
    store, warned = ready.store, []
    about = partial(record.beside, on.recipe, visible(ready.made.layout.sizes), ready.train, passed)

    def save(number: int, state: State, metrics: Mapping[str, float], found: Audit) -> None:
        owed = due(number) and not metrics
        store.save(number, state, about(number, owed, watch.seen, on.log.saving(number)), metrics, found.checksum)
        on.log.committed(store.committed)
        grace = on.recipe.checkpoint.grace
        if store.took > grace and not warned:
            warned.append(on.console.warn(f"a save takes {store.took:.0f} s; a preempted machine is left {grace:.0f}"))

    return save


def _pretended(devices: list[Any]) -> bool:
    return devices[0].platform == "cpu" and jax.local_device_count() > 1
