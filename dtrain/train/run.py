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
from dtrain.core.heartbeat import HeartbeatWriter
from dtrain.core.lease import leased
from dtrain.core.run_control import RunControl
from dtrain.core.run_dir import Folder, folder
from dtrain.data.source import refuse_changed
from dtrain.parallel.compile_cache import Counter
from dtrain.parallel.devices import are_pretended, await_compiled
from dtrain.parallel.mesh import mesh_sizes
from dtrain.recipe.recipe import Recipe
from dtrain.track.console import Console
from dtrain.track.notifier import notifying
from dtrain.train import provenance, record, trace_checks
from dtrain.train.assembly import Assembly, assemble
from dtrain.train.banner import banner
from dtrain.train.checksum import StateChecksum, state_checksum
from dtrain.train.hooks import Evaluation, Log, Saving
from dtrain.train.input import eval_batches, refuse_broken_contract, train_batches
from dtrain.train.interrupt import listening
from dtrain.train.loop import StepEvent, loop
from dtrain.train.loss_guard import LossGuard, Rollback
from dtrain.train.measured import declared_rising, refuse_unmeasured
from dtrain.train.planned import compare_with_plan
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
            log = stack.enter_context(record.run_record(place, recipe, lead))
            interrupt.close = notifier.closing(partial(close_now, log, lease, control, dry))
        if control:
            control.report_share(notifier.spent)
            interrupt.attach(control)
        heartbeat = stack.enter_context(
            closing(HeartbeatWriter(place.heartbeat(jax.process_index()), recipe.guard.patience))
        )
        log.clock.entered = heartbeat
        holds = lease.holds if lease else lambda: None
        _train(Session(recipe, place, console, log, heartbeat, interrupt, stack, dry, holds, notifier))
    return place


def _train(session: Session) -> None:
    ready = _ready(session)
    while True:
        with ExitStack() as stack:
            rollback = _attempt(dataclasses.replace(session, stack=stack), ready)
        if rollback is None:
            return
        session.log.rolled_back(rollback, session.recipe.guard.budget)
        session.console.warn(f"{rollback.message}: going back to the newest checkpoint, over the batches since")


def _ready(session: Session) -> Ready:
    train, test = session.recipe.data.open("train"), session.recipe.data.open("test")
    steps, devices = session.recipe.total_steps(len(train)), jax.devices()
    if unfit := session.recipe.model.mismatch(test.example):
        raise DataError(f"held-out examples: {unfit}", "change the model's sizes, or the data")

    assembly = assemble(session.recipe, devices, train.example, steps)
    now, rising = provenance.conditions(assembly), declared_rising(session.recipe.model)
    session.log.about(devices, mesh_sizes(assembly.layout.sizes), steps, rising, getattr(train, "names", ()))
    for line in banner(assembly, train, test, steps, devices):
        session.console.say(line)
    step, evaluate = _compiled(session, assembly)
    refuse_unmeasured(session.recipe.checkpoint.best, evaluate, "token" in train.example, rising)
    place, policy = session.place.checkpoints.absolute(), session.recipe.checkpoint
    store = Store(place, policy, holds=session.holds, rising=rising)
    session.stack.callback(note_committed, session, store)  # once the store has waited for the save under way
    session.stack.enter_context(store)
    store.refuse_without_room(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(assembly.shapes)))
    return Ready(
        assembly,
        train,
        test,
        step,
        evaluate,
        store,
        compare_with_plan(session.place, assembly, devices),
        FromFirst(),
        now,
    )


def _attempt(session: Session, ready: Ready) -> Rollback | None:
    """From the newest checkpoint to the end, or to a step that it is better to go back from."""
    assembly, store, steps = ready.assembly, ready.store, ready.assembly.steps
    state, start = first_state(assembly, store, ready.train, ready.now, session.console, session.log)
    if unchecked := refuse_broken_contract(assembly, ready.evaluate, ready.test, state):
        session.console.warn(unchecked)
    with session.clock("compile"):
        jax.block_until_ready(
            state_checksum(start.step, state).sums
        )  # compiles it, which the first save has no time for
    session.log.resumed(start.step, start.step_s)
    session.notifier.resumed(start.step, steps)
    end = min(steps, start.step + DRY_STEPS) if session.dry else steps

    hooks = _, logging, evaluation, saving = _hooks(session, ready, start, end)
    if not session.dry:
        session.interrupt.phase = "training"
    batches = train_batches(
        assembly, ready.train, start.step + start.batches_skipped, end + start.batches_skipped, session.console.warn
    )
    try:
        with session.console.progress(start.step, steps), session.clock.rest("step"):
            logging.begin(start.step)
            if start.eval_pending:
                measured = evaluation.measure(start.step, state)
                if measured is None:
                    raise session.interrupt.end(start.step, steps, ready.exchange)
                store.note(start.step, measured)
            state, stopped = loop(
                ready.step,
                state,
                session.stack.enter_context(closing(batches)),
                span=range(start.step + 1, end + 1),
                hooks=[partial(_alive, session), *hooks],
                stop=session.interrupt.agreed,
                clock=session.clock,
                one_at_a_time=saving.one_at_a_time,
            )
    except Rollback as rollback:
        with session.clock("save"), suppress(NotFinite):  # of a save that is not to be kept either
            store.wait()
        return rollback.with_traceback(None)  # whose frames would keep the state in memory
    if not stopped:
        session.interrupt.phase = "finishing"
    with session.clock("save"):
        store.wait()
    session.log.committed(store.committed)
    if ready.planned and logging.step_ms:
        session.console.say(ready.planned.against(statistics.median(logging.step_ms)))
    if session.dry:
        compare(assembly, store, state, end, session.console)
    elif stopped and (saving.saved < steps or evaluation.abandoned):
        raise session.interrupt.end(saving.saved, steps, ready.exchange)
    return None


def _hooks(session: Session, ready: Ready, start: Start, end: int) -> tuple[LossGuard, Log, Evaluation, Saving]:
    """What happens after each step, in this order."""
    assembly, recipe, pretended = ready.assembly, session.recipe, are_pretended(jax.devices())
    skipping, often = recipe.guard.not_finite == "skip", recipe.checkpoint
    span = (start.step, end)
    report, sync = reporter(
        assembly, session.place, session.console, session.log.ids, session.stack, span=span, planned=ready.planned
    )
    logging = Log(1 if session.dry else recipe.track.every, report, session.clock, skipping)
    held_out = partial(eval_batches, assembly, ready.test, 1 if session.dry else None)
    tokens, agreed = "token" in ready.train.example, session.interrupt.agreed
    evaluation = Evaluation(
        recipe.evaluate, ready.evaluate, held_out, logging, session.clock, tokens, agreed, one_at_a_time=pretended
    )
    watch = LossGuard(recipe.guard, start.batches_skipped, lambda step: saving.due(step) or evaluation.due(step))
    watch.recall(start.seen)
    save = _saver(session, ready, start, lambda step: evaluation.due(step) or step == end, watch, sync)
    timer = SaveTimer(
        0.0 if session.dry else 60 * often.minutes, jax.process_count(), start.step, exchange=ready.exchange
    )
    saving = Saving(often.every, often.best, save, session.clock, pretended, skipping, logging.flush, timer)
    return watch, logging, evaluation, saving


def _alive(session: Session, event: StepEvent) -> None:
    session.console.tick(event.step)
    session.heartbeat.step = event.step
    session.heartbeat("step")
    fault_injection.strike(f"step:{event.step}", jax.process_index())


def _compiled(session: Session, assembly: Assembly) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """The training and the evaluation step, compiled, after a look at what the first is made of."""
    with session.clock("compile"):
        fault_injection.strike("compile", jax.process_index())
        traced = assembly.train()
        warnings = trace_checks.baked_constants(traced, session.recipe.guard.constants_mb)
        warnings += _impure(session, assembly, traced) if session.recipe.guard.purity else []
        build = partial(session.recipe.engine.compile, platform=assembly.layout.platform)
        with Counter() as programs:
            step, evaluate = build(traced), build(assembly.evaluate())
        await_compiled()
    for line in warnings:
        session.console.warn(line)
    session.log.values["compiled_from_cache"] = programs.all_read
    session.console.say(f"compiled in {session.clock.of('compile'):.1f} s{', from the cache' * programs.all_read}")
    return step, evaluate


def _impure(session: Session, assembly: Assembly, traced: jax.stages.Traced) -> list[str]:
    """Warnings where a second trace differs. An earlier start of the run that gave the same program is one."""
    program = trace_checks.fingerprint(traced)
    if program == session.log.values["pure_trace"]:
        return []
    warnings = trace_checks.trace_differences(assembly.train, traced)
    session.log.values["pure_trace"] = "" if warnings else program
    return warnings


def _saver(
    session: Session, ready: Ready, start: Start, due: Callable[[int], bool], watch: LossGuard, sync: Callable[[], None]
) -> Callable[[int, State, Mapping[str, float], StateChecksum], None]:
    store, warned = ready.store, []
    about = partial(provenance.about, start.now, session.recipe, ready.train, start.batches_skipped)

    def save(number: int, state: State, metrics: Mapping[str, float], found: StateChecksum) -> None:
        refuse_changed(ready.train, ready.test)
        eval_pending = due(number) and not metrics

        def proof() -> Sequence[int]:
            sync()  # what was measured up to this step is kept before it is one to resume from
            return found.checksum()

        store.save(number, state, about(number, eval_pending, watch.seen, session.log.saving(number)), metrics, proof)
        session.log.committed(store.committed)
        if store.took > (grace := session.recipe.checkpoint.grace) and not warned:
            warned.append(
                session.console.warn(f"a save takes {store.took:.0f} s; a preempted machine is left {grace:.0f}")
            )

    return save
