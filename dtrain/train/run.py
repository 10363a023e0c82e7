"""A run, read from top to bottom."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import jax

from dtrain.checkpoint.store import Store
from dtrain.core import fault_injection, signals
from dtrain.core.errors import DataError, NotFinite
from dtrain.core.heartbeat import Beat
from dtrain.core.lease import leased
from dtrain.core.run_control import RunControl
from dtrain.core.run_dir import Folder, folder
from dtrain.data.source import refuse_changed
from dtrain.parallel.compile_cache import Counter
from dtrain.parallel.devices import are_pretended, await_compiled
from dtrain.parallel.mesh import visible
from dtrain.recipe.recipe import Recipe
from dtrain.track.console import Console
from dtrain.track.notifier import notifying
from dtrain.train import provenance, record, trace_checks
from dtrain.train.assembly import Assembly, assemble
from dtrain.train.banner import introduction
from dtrain.train.checksum import Audit, audit
from dtrain.train.hooks import Evaluation, Log, Saving
from dtrain.train.input import eval_batches, refuse_broken_contract, train_batches
from dtrain.train.interrupt import listening
from dtrain.train.loop import Moment, loop
from dtrain.train.loss_guard import RolledBack, Watch
from dtrain.train.measured import declared_rising, refuse_unmeasured
from dtrain.train.planned import forecast
from dtrain.train.recipe_check import finished, refuse_changes
from dtrain.train.reporting import reporter
from dtrain.train.resume import Start, compare, first_state
from dtrain.train.save_timer import FromFirst, SaveTimer
from dtrain.train.session import Ready, Session, close_now, note_committed
from dtrain.train.state import State

DRY_STEPS = 3


def run(
    recipe: Recipe,
    runs: Path,
    console: Console,
    *,
    allow_changes: bool = False,
    dry: bool = False,
    control: RunControl | None = None,
) -> Folder | None:
    """Train to the end, from the newest checkpoint where there is one; the run folder.

    None where the run was already finished. `dry` does a few steps, a save and a restore. `control`, which has begun,
    tells of stop requests and limits. Raises Stopped when asked to stop, after saving.
    """
    place, lead = folder(runs, recipe.name), jax.process_index() == 0
    with ExitStack() as stack:
        if lead:
            place.prepare()
            console.log = place.log
            stack.callback(console.close)
        if finished(place, recipe):
            console.say(f"{recipe.name} is already finished: `dtrain report {place.path}` shows it", "green")
            console.say("to train anew, give the run another name: name=...")
            return None
        notify = recipe.track.notify if lead and not dry else None
        notifier = stack.enter_context(notifying(notify, place, console.warn, recipe.guard.patience))
        refuse_changes(place, recipe, allow_changes)
        interrupt = stack.enter_context(listening(console.say))
        with signals.held():
            lease = stack.enter_context(leased(place.lease, console.warn)) if lead else None
            log = stack.enter_context(record.kept(place, recipe, lead))
            interrupt.close = notifier.closing(partial(close_now, log, lease, control, dry))
        if control:
            control.report_share(notifier.spent)
            interrupt.attach(control)
        beat = stack.enter_context(closing(Beat(place.beat(jax.process_index()), recipe.guard.patience)))
        log.clock.entered = beat
        holds = lease.holds if lease else lambda: None
        _train(Session(recipe, place, console, log, beat, interrupt, stack, dry, holds, notifier))
    return place


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
    if unfit := on.recipe.model.mismatch(test.example):
        raise DataError(f"held-out examples: {unfit}", "change the model's sizes, or the data")

    made = assemble(on.recipe, devices, train.example, steps)
    now, rising = provenance.conditions(made), declared_rising(on.recipe.model)
    on.log.about(devices, visible(made.layout.sizes), steps, rising, getattr(train, "names", ()))
    for line in introduction(made, train, test, steps, devices):
        on.console.say(line)
    step, evaluate = _compiled(on, made)
    refuse_unmeasured(on.recipe.checkpoint.best, evaluate, "token" in train.example, rising)
    place, policy = on.place.checkpoints.absolute(), on.recipe.checkpoint
    store = Store(place, policy, holds=on.holds, rising=rising)
    on.stack.callback(note_committed, on, store)  # once the store has waited for the save under way
    on.stack.enter_context(store)
    store.refuse_without_room(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made.shapes)))
    return Ready(made, train, test, step, evaluate, store, forecast(on.place, made, devices), FromFirst(), now)


def _attempt(on: Session, ready: Ready) -> RolledBack | None:
    """From the newest checkpoint to the end, or to a step that it is better to go back from."""
    made, store, steps = ready.made, ready.store, ready.made.steps
    state, start = first_state(made, store, ready.train, ready.now, on.console, on.log)
    if unchecked := refuse_broken_contract(made, ready.evaluate, ready.test, state):
        on.console.warn(unchecked)
    with on.clock("compile"):
        jax.block_until_ready(audit(start.step, state).sums)  # compiles it, which the first save has no time for
    on.log.resumed(start.step, start.step_s)
    on.notifier.resumed(start.step, steps)
    end = min(steps, start.step + DRY_STEPS) if on.dry else steps

    hooks = _, logging, evaluation, saving = _hooks(on, ready, start, end)
    if not on.dry:
        on.interrupt.phase = "training"
    batches = train_batches(made, ready.train, start.step + start.passed, end + start.passed, on.console.warn)
    try:
        with on.console.progress(start.step, steps), on.clock.rest("step"):
            logging.begin(start.step)
            if start.owed:
                measured = evaluation.measure(start.step, state)
                if measured is None:
                    raise on.interrupt.end(start.step, steps, ready.exchange)
                store.note(start.step, measured)
            state, stopped = loop(
                ready.step,
                state,
                on.stack.enter_context(closing(batches)),
                span=range(start.step + 1, end + 1),
                hooks=[partial(_alive, on), *hooks],
                stop=on.interrupt.agreed,
                clock=on.clock,
                one_at_a_time=saving.one_at_a_time,
            )
    except RolledBack as spoiled:
        with on.clock("save"), suppress(NotFinite):  # of a save that is not to be kept either
            store.wait()
        return spoiled.with_traceback(None)  # whose frames would keep the state in memory
    if not stopped:
        on.interrupt.phase = "finishing"
    with on.clock("save"):
        store.wait()
    on.log.committed(store.committed)
    if ready.foretold and logging.step_ms:
        on.console.say(ready.foretold.against(statistics.median(logging.step_ms)))
    if on.dry:
        compare(made, store, state, end, on.console)
    elif stopped and (saving.saved < steps or evaluation.abandoned):
        raise on.interrupt.end(saving.saved, steps, ready.exchange)
    return None


def _hooks(on: Session, ready: Ready, start: Start, end: int) -> tuple[Watch, Log, Evaluation, Saving]:
    """What happens after each step, in this order."""
    made, recipe, pretended = ready.made, on.recipe, are_pretended(jax.devices())
    skipping, often = recipe.guard.not_finite == "skip", recipe.checkpoint
    span = (start.step, end)
    report, sync = reporter(made, on.place, on.console, on.log.ids, on.stack, span=span, planned=ready.foretold)
    logging = Log(1 if on.dry else recipe.track.every, report, on.clock, skipping)
    held_out = partial(eval_batches, made, ready.test, 1 if on.dry else None)
    tokens, agreed = "token" in ready.train.example, on.interrupt.agreed
    evaluation = Evaluation(
        recipe.evaluate, ready.evaluate, held_out, logging, on.clock, tokens, agreed, one_at_a_time=pretended
    )
    watch = Watch(recipe.guard, start.passed, lambda step: saving.due(step) or evaluation.due(step))
    watch.recall(start.seen)
    save = _saver(on, ready, start, lambda step: evaluation.due(step) or step == end, watch, sync)
    timer = SaveTimer(0.0 if on.dry else 60 * often.minutes, jax.process_count(), start.step, exchange=ready.exchange)
    saving = Saving(often.every, often.best, save, on.clock, pretended, skipping, logging.flush, timer)
    return watch, logging, evaluation, saving


def _alive(on: Session, at: Moment) -> None:
    on.console.tick(at.step)
    on.beat.step = at.step
    on.beat("step")
    fault_injection.strike(f"step:{at.step}", jax.process_index())


def _compiled(on: Session, made: Assembly) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """The training and the evaluation step, compiled, after a look at what the first is made of."""
    with on.clock("compile"):
        fault_injection.strike("compile", jax.process_index())
        traced = made.train()
        warnings = trace_checks.captured(traced, on.recipe.guard.constants_mb)
        warnings += _impure(on, made, traced) if on.recipe.guard.purity else []
        build = partial(on.recipe.engine.compile, platform=made.layout.platform)
        with Counter() as programs:
            step, evaluate = build(traced), build(made.evaluate())
        await_compiled()
    for line in warnings:
        on.console.warn(line)
    on.log.values["compiled_from_cache"] = programs.all_read
    on.console.say(f"compiled in {on.clock.of('compile'):.1f} s{', from the cache' * programs.all_read}")
    return step, evaluate


def _impure(on: Session, made: Assembly, traced: jax.stages.Traced) -> list[str]:
    """Warnings where a second trace differs. An earlier start of the run that gave the same program is one."""
    program = trace_checks.fingerprint(traced)
    if program == on.log.values["pure_trace"]:
        return []
    warnings = trace_checks.impure(made.train, traced)
    on.log.values["pure_trace"] = "" if warnings else program
    return warnings


def _saver(
    on: Session, ready: Ready, start: Start, due: Callable[[int], bool], watch: Watch, sync: Callable[[], None]
) -> Callable[[int, State, Mapping[str, float], Audit], None]:
    store, warned = ready.store, []
    about = partial(provenance.about, start.now, on.recipe, ready.train, start.passed)

    def save(number: int, state: State, metrics: Mapping[str, float], found: Audit) -> None:
        refuse_changed(ready.train, ready.test)
        owed = due(number) and not metrics

        def proof() -> Sequence[int]:
            sync()  # what was measured up to this step is kept before it is one to resume from
            return found.checksum()

        store.save(number, state, about(number, owed, watch.seen, on.log.saving(number)), metrics, proof)
        on.log.committed(store.committed)
        if store.took > (grace := on.recipe.checkpoint.grace) and not warned:
            warned.append(on.console.warn(f"a save takes {store.took:.0f} s; a preempted machine is left {grace:.0f}"))

    return save
