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
import numpy as np

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
from dtrain.introduction import introduction, mesh_text
from dtrain.parallel.engine import local_rows, put
from dtrain.parallel.mesh import visible
from dtrain.recipe.load import plain
from dtrain.recipe.recipe import Recipe
from dtrain.track.console import Console, eval_line, step_line
from dtrain.track.jsonl import lines
from dtrain.track.meters import Meters, peak_of
from dtrain.track.tracker import About
from dtrain.train import guard
from dtrain.train.clock import Clock
from dtrain.train.hooks import Evaluation, Log, Report, Saving
from dtrain.train.interrupt import Interrupt, listening
from dtrain.train.loop import loop
from dtrain.train.state import State, born

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
    with record.kept(place, recipe, lead) as log, listening(console.say) as interrupt, ExitStack() as stack:
        _train(Session(recipe, place, console, log, interrupt, stack, dry))
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

    store = on.stack.enter_context(Store(on.place.checkpoints.absolute(), on.recipe.checkpoint))
    state, start = _first_state(on, made, store, train)
    on.log.step(start)
    end = min(steps, start + DRY_STEPS) if on.dry else steps

    logging = Log(1 if on.dry else on.recipe.track.every, _reporter(on, made, start, end, steps, foretold), on.clock)
    held_out = partial(_eval_batches, made, test, 1 if on.dry else None)
    evaluation = Evaluation(on.recipe.evaluate, evaluate, held_out, logging, on.clock, "token" in train.example)
    saving = Saving(on.recipe.checkpoint.every, on.recipe.checkpoint.best, _saver(on, made, store, train), on.clock)

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
            one_at_a_time=_pretended(devices),
        )
    with on.clock("save"):
        store.wait()
    if foretold and logging.step_ms:
        on.console.say(foretold.against(statistics.median(logging.step_ms)))
    if on.dry:
        _compare(on, made, store, state, end)
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


def _first_state(on: Session, made: Assembly, store: Store, train: Source) -> tuple[State, int]:
    """The state to go on from, and its step: the newest checkpoint, or born sharded."""
    newest = store.newest()
    if newest is None:
        return born(made.make, made.shapes), 0
    with on.clock("restore"):
        saved = store.about(newest)
        if saved["data"] != train.fingerprint:
            was = f"the run has seen {saved['data']}, now there is {train.fingerprint}"
            raise DataError(
                f"the data changed: {was}", "put the same examples back, or give this run another name: name=..."
            )
        state = store.restore(newest, made.shapes)
    on.console.say(f"resumed from step {newest} ({_promise(saved, made)})", "green")
    return state, newest


def _promise(saved: Mapping[str, Any], made: Assembly) -> str:
    """What a restart keeps: sums are taken in the same order only by the same mesh and processes."""
    processes = jax.process_count()
    if (saved["mesh"], saved["processes"]) == (visible(made.layout.sizes), processes):
        return "same mesh and processes: the same bits"
    was = f"mesh {mesh_text(saved['mesh'])}, processes {saved['processes']}"
    return f"saved on {was}: the same numbers but for rounding"


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
) -> Callable[[int, State, Mapping[str, float]], None]:
    def save(number: int, state: State, metrics: Mapping[str, float]) -> None:
        store.save(number, state, record.beside(on.recipe, visible(made.layout.sizes), train, number), metrics)
        on.log.step(number)

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


def _compare(on: Session, made: Assembly, store: Store, state: State, step: int) -> None:
    """Read the dry run's checkpoint back and hold every bit against the state in memory."""
    restored = store.restore(step, made.shapes)
    same = jax.tree.map(_same_bits, state, restored)
    leaves = jax.tree.leaves(same)
    assert all(leaves), "the restored state differs from the saved one"
    values = sum(leaf.size for leaf in jax.tree.leaves(state))
    on.console.say(f"dry run: {step} steps, a save and a restore; {values:,} values equal bit for bit", "green")


def _same_bits(a: jax.Array, b: jax.Array) -> bool:
    pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
    return all(np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes() for x, y in pairs)
