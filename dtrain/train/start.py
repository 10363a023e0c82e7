"""Build what a start of a run needs before its first step: data, assembly, compiled steps, checkpoint store."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import jax

from dtrain.assembly import trace_checks
from dtrain.assembly.assemble import Assembly, assemble
from dtrain.assembly.checksum import StateChecksum
from dtrain.assembly.frozen import frozen_models
from dtrain.assembly.input import eval_batches
from dtrain.assembly.state import State, saved
from dtrain.checkpoint.copies import Copies
from dtrain.checkpoint.store import Store
from dtrain.core import fault_injection
from dtrain.core.errors import DataError, DtrainError, RecipeError
from dtrain.core.types import JsonObject
from dtrain.data.batch import Batch
from dtrain.data.batches import refuse_changed
from dtrain.data.class_weights import class_counts, class_weights
from dtrain.data.lost_text import lost_text
from dtrain.data.overlap import overlap
from dtrain.data.source import UNKNOWN, Source
from dtrain.inference.evaluate import text_bytes
from dtrain.parallel.compile_cache import Counter
from dtrain.parallel.devices import are_fake, await_compiled
from dtrain.parallel.engine import Traced
from dtrain.parallel.mesh import mesh_sizes
from dtrain.recipe.recipe import Recipe, watched
from dtrain.track.text import epochs_text
from dtrain.train import provenance
from dtrain.train.evaluations import AtEvaluations, at_evaluations, metrics_named, progress_of, refuse_unmeasured
from dtrain.train.hooks import Evaluation, Log, Saving
from dtrain.train.loop import Hook, StepEvent
from dtrain.train.loss_guard import LossGuard
from dtrain.train.performance_warnings import PerformanceWarnings
from dtrain.train.profile import Profiler
from dtrain.train.progress import Progress
from dtrain.train.reporting import PlanComparison, banner, compare_with_plan, reporter
from dtrain.train.resume import Start
from dtrain.train.save_timer import ClockOfRank0, SaveTimer
from dtrain.train.session import Session
from dtrain.weights.initial import Initial, initial_from, recorded_sources

Keep = Callable[[int, State, Mapping[str, float], StateChecksum], None]
"""Keeps the state of a step, with what was evaluated there."""
SHOWN = 20
"""Most classes that a line names."""
SLOW_COMPILE = 10.0
"""Seconds of compilation from which on it matters that the programs of a restart were not in the cache."""


@dataclass(frozen=True)
class RunSetup:
    """What stays the same when the run is rolled back."""

    assembly: Assembly
    train: Source
    test: Source
    step: jax.stages.Compiled
    evaluate: jax.stages.Compiled
    store: Store
    planned: PlanComparison | None
    exchange: ClockOfRank0
    now: JsonObject
    """Everything that the numbers of this start depend on; see `provenance.conditions`."""
    evaluations: AtEvaluations
    every: int
    """Steps between evaluations; 0: only at the end."""
    copies: Copies | None = None
    """The copies of the state in memory, if the recipe asks for them."""
    initial: Mapping[str, Initial] = field(default_factory=dict)
    """What a start takes from elsewhere; see `initial.elsewhere`."""

    def forget_copies(self) -> None:
        """Remove the copies in memory, if there are any."""
        if self.copies:
            self.copies.clear()


def prepare(session: Session) -> RunSetup:
    """Open the data, assemble and compile both steps, open the store.

    Raises DataError if the model cannot take the held-out data, RecipeError if `checkpoint.best` is not measured,
    EnvironmentFault if the disk has no room for a checkpoint, or if a tracker cannot start.
    """
    train, test = session.recipe.data.open("train"), session.recipe.data.open("test")
    steps, devices = session.recipe.total_steps(len(train)), jax.devices()
    if (reached := session.log.reached) > steps:
        message = f"{session.run_dir.path} has saved step {reached:,}, and this recipe ends at step {steps:,}"
        hint = f"train longer, for example with steps={reached + steps}; or start again under another name: name=..."
        raise RecipeError(message, hint)
    if unfit := session.recipe.model.mismatch(test.example):
        raise DataError(f"held-out examples: {unfit}", "change the model's sizes, or the data")

    _refuse_other_test(session, train, test)
    weights = class_weights(session.recipe.class_weights, train)
    if jax.process_index() == 0 and not session.dry and not session.log.reached:
        for tracker in session.recipe.track.to:
            tracker.check()
    assembly = assemble(session.recipe, devices, train.example, steps, frozen_models(session.recipe))
    now, evaluations = provenance.conditions(assembly), at_evaluations(session, assembly, test)
    epochs = round(steps * session.recipe.batch / len(train), 4)
    copies = list(overlap(train, test))
    session.log.about(
        devices,
        mesh_sizes(assembly.layout.sizes),
        steps,
        evaluations.metrics,
        classes=train.class_names,
        fitted={"kind": session.recipe.data.kind, "values": train.fitted} if train.fitted else None,
        data={
            "kind": session.recipe.data.kind,
            "train": len(train),
            "test": len(test),
            "epochs": epochs,
            "fingerprints": {"train": train.fingerprint, "test": test.fingerprint},
            "overlap": copies,
        },
    )
    for line in banner(assembly, train, test, steps, devices):
        session.console.say(line)
    for line in [*copies, *lost_text(session.recipe.data, copied=True)]:
        session.console.warn(line)
    if weights is not None:
        each = zip(list(class_counts(train))[:SHOWN], weights.tolist(), strict=False)
        more = f" and {len(weights) - SHOWN} more" if len(weights) > SHOWN else ""
        session.console.say(f"weights of the classes: {', '.join(f'{name} {one:.3g}' for name, one in each)}{more}")
    recipe, decides = session.recipe, bool(watched(session.recipe))
    every = recipe.evaluate.interval(steps, recipe.batch, len(train), len(test), decides)
    if every and recipe.evaluate.every is None:
        session.console.say(
            f"evaluated every {every:,} steps = {epochs_text(every * recipe.batch / len(train))} epochs"
        )
    if session.recipe.guard.nan == "locate" and jax.process_count() > 1:
        message = f"guard.nan: locate needs a run of one process, this one has {jax.process_count()}"
        session.console.warn(f"{message}: a loss that is not finite is only reported")
    initial = _initial(session, assembly)
    with session.clock("compile"):
        evaluation = assembly.evaluate()
    for key, name in metrics_named(session.recipe).items():
        bytes_per_token = text_bytes(session.recipe, test)
        refuse_unmeasured(key, name, evaluation, bytes_per_token, evaluations.metrics, evaluations.scores)
    step, evaluate = _compiled(session, assembly, evaluation)
    run_dir, policy = session.run_dir.checkpoints.absolute(), session.recipe.checkpoint
    store = Store(run_dir, policy, holds=session.holds, metrics=evaluations.metrics)
    session.stack.callback(_note_committed, session, store)  # runs after the store has waited for a pending save
    session.stack.enter_context(store)
    shapes = saved(assembly.shapes, assembly.layout.declared)
    store.refuse_without_room(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)))
    kept = None
    if policy.memory and not session.dry:
        kept = Copies(session.run_dir, session.log.values["started"], policy.memory, shapes)
        if kept.fewer:
            session.console.warn(kept.fewer)
    return RunSetup(
        assembly,
        train,
        test,
        step=step,
        evaluate=evaluate,
        store=store,
        planned=_planned(session, assembly, devices),
        exchange=ClockOfRank0(),
        now=now,
        evaluations=evaluations,
        every=every,
        copies=kept,
        initial=initial,
    )


def _refuse_other_test(session: Session, train: Source, test: Source) -> None:
    """DataError if the held-out examples of a run that has saved steps are others, and the recipe's data is the same:
    metrics before and after would be of different examples, and so would the best checkpoint. If those to train on are
    others as well, `resume` refuses them."""
    recorded = (session.log.values.get("data") or {}).get("fingerprints", {})
    known = recorded.get("test")
    same = known in (None, UNKNOWN, test.fingerprint) or recorded.get("train") != train.fingerprint
    if session.log.held is None or same:
        return
    changed = [line for change in session.log.held.get("changes", ()) for line in change["recipe"]]
    if not any(line.startswith("data") for line in changed):
        was = f"the run was evaluated on {known}, the recipe now gives {test.fingerprint}"
        hint = "restore the same examples, or give this run another name: name=..."
        raise DataError(f"the held-out data changed: {was}", hint, "E-DATA-CHANGED")
    session.console.warn("the held-out examples are others than before: metrics before and after do not compare")


def _initial(session: Session, assembly: Assembly) -> dict[str, Initial]:
    found, warn = recorded_sources(session.recipe, session.run_dir), session.console.warn
    return {part: initial_from(assembly, origin, warn, part) for part, origin in found.items()}


def _compiled(
    session: Session, assembly: Assembly, evaluation: Traced
) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """Check the traced training step, then compile the training and the evaluation step."""
    with session.clock("compile"):
        fault_injection.strike("compile", jax.process_index())
        traced, known = assembly.train(), session.log.values["pure_trace"]
        warnings = trace_checks.baked_constants(traced, session.recipe.guard.constants_mb)
        warnings += trace_checks.callbacks(traced)
        warnings += _impure(session, assembly, traced) if session.recipe.guard.purity else []
        # XLA compiles without Python's lock: both programs at the same time
        with Counter() as programs, ThreadPoolExecutor(1) as thread:
            other = thread.submit(assembly.compile, evaluation, warnings.append)
            step, evaluate = assembly.compile(traced, warnings.append), other.result()
        await_compiled()
    same = known and session.recipe.guard.purity and session.log.values["pure_trace"] == known
    if same and session.log.values["compiled_before"]:  # else that start ended before it had compiled the program
        warnings += cold_cache(programs, session.clock.of("compile"))
    for line in warnings:
        session.console.warn(line)
    session.log.values["compiled_from_cache"] = programs.all_read
    session.console.say(f"compiled in {session.clock.of('compile'):.1f} s{', from the cache' * programs.all_read}")
    return step, evaluate


def cold_cache(programs: Counter, seconds: float) -> list[str]:
    """A warning if a restart had to compile for long the program that an earlier start had compiled."""
    if programs.all_read or seconds < SLOW_COMPILE:
        return []
    where = "keep ~/.cache/dtrain/xla between starts, or set JAX_COMPILATION_CACHE_DIR to a folder that machines share"
    return [f"the programs of this run were not in the compilation cache, compiling took {seconds:.0f} s; {where}"]


def _impure(session: Session, assembly: Assembly, traced: Traced) -> list[str]:
    """Warnings if a second trace differs from the first. An earlier start of the run counts as the second trace."""
    program = trace_checks.fingerprint(traced)
    if program == session.log.values["pure_trace"]:
        return []
    warnings = trace_checks.trace_differences(assembly.train, traced)
    session.log.values["pure_trace"] = "" if warnings else program
    return warnings


def _planned(session: Session, assembly: Assembly, devices: Sequence[object]) -> PlanComparison | None:
    """The plan of this step, if there is one; run.json keeps what a report compares."""
    found = compare_with_plan(session.run_dir, assembly, devices)
    session.log.values["planned"] = found.record if found else None
    return found


def _note_committed(session: Session, store: Store) -> None:
    """Write the newest saved step into run.json; errors of the disk are ignored here."""
    with suppress(DtrainError, OSError):
        session.log.committed(store.committed)


@dataclass(frozen=True)
class Hooks:
    """The hooks of one attempt."""

    alive: Hook
    guard: LossGuard
    logging: Log
    evaluation: Evaluation
    progress: Progress
    saving: Saving
    watch: PerformanceWarnings
    profiler: Profiler
    """Of process 0; in other processes it is not called."""

    def ends(self, step: int) -> bool:
        """Whether a call of several steps ends at this step, the same in every process."""
        saves = self.saving.due_by_step(step) or self.saving.copied(step)
        return saves or self.evaluation.due(step) or self.profiler.ends(step)

    def used(self, step: int) -> bool:
        """Whether the state after this step is used. With several processes, all must call this after every call."""
        lead = jax.process_index() == 0
        saves = self.saving.due(step) or self.saving.copied(step)
        return saves or self.evaluation.due(step) or (lead and self.profiler.waits(step))

    @property
    def ordered(self) -> list[Hook]:
        """In the order of their calls: the guard comes before the hooks that log or save a loss that it refuses."""
        profiler = [self.profiler] if jax.process_index() == 0 else []
        return [
            self.alive,
            *profiler,
            self.watch,
            self.guard,
            self.logging,
            self.evaluation,
            self.progress,
            self.saving,
        ]


def step_hooks(session: Session, ready: RunSetup, start: Start, end: int) -> Hooks:
    """The hooks of an attempt that starts at `start` and ends with step `end`."""
    assembly, recipe, faked = ready.assembly, session.recipe, are_fake(jax.devices())
    skipping, often = recipe.guard.not_finite == "skip", recipe.checkpoint
    span = (start.step, end)
    report, trackers, sync = reporter(
        assembly,
        session.run_dir,
        session.console,
        session.log,
        session.stack,
        span=span,
        planned=ready.planned,
        metrics=ready.evaluations.metrics,
    )
    logging = Log(1 if session.dry else recipe.track.every, report, session.clock, skipping)
    logging.sources = tuple(ready.train.parts())
    logging.counts = partial(_rows_of_sources, ready.train, recipe, start.batches_skipped)
    held_out = partial(_held_out, assembly, ready.test, 1 if session.dry else None)
    agreed = session.interrupt.agreed
    evaluation = Evaluation(
        ready.every,
        ready.evaluate,
        held_out,
        log=logging,
        clock=session.clock,
        bytes_per_token=text_bytes(recipe, ready.test),
        bytes_of_sources={name: text_bytes(recipe, part) or 0.0 for name, part in ready.test.parts().items()},
        more=list(ready.evaluations.each(session, trackers, end)),
        stop=agreed,
        one_at_a_time=faked,
    )

    def kept(step: int) -> bool:  # the state after this step is saved, copied or measured
        return saving.due(step) or saving.copied(step) or evaluation.due(step)

    guard = LossGuard(recipe.guard, start.batches_skipped, kept)
    guard.recall(start.guard_state)
    progress = progress_of(session, ready.evaluations.metrics, start.progress)

    def hooks_state() -> JsonObject:
        return {"guard_state": dict(guard.state), "progress": progress.plain}

    ends = lambda step: evaluation.due(step) or step == end  # noqa: E731
    save, copy = _keepers(session, ready, start, ends, hooks_state, sync)
    timer = SaveTimer(
        0.0 if session.dry else 60 * often.minutes, jax.process_count(), start.step, exchange=ready.exchange
    )
    saving = Saving(
        often.every,
        often.best,
        save,
        clock=session.clock,
        one_at_a_time=faked,
        skipping=skipping,
        flush=logging.flush,
        timer=timer,
        copy=copy,
        copy_every=often.memory.every if often.memory and not session.dry else 0,
    )
    watch = PerformanceWarnings(session.clock, logging.every, recipe.data.load.workers, session.console.warn)
    profiler = Profiler(session.run_dir, ready.step.as_text, recipe.profile, session.clock, session.console.say)
    return Hooks(
        partial(_alive, session),
        guard,
        logging,
        evaluation,
        progress,
        saving=saving,
        watch=session.stack.enter_context(watch),
        profiler=profiler,
    )


def _held_out(assembly: Assembly, test: Source, limit: int | None) -> Iterator[tuple[str, Batch]]:
    """The batches of the held-out examples, of each source of a mixture in turn."""
    parts = test.parts() or {"": test}
    for name, source in parts.items():
        yield from ((name, batch) for batch in eval_batches(assembly, source, limit))


def _rows_of_sources(train: Source, recipe: Recipe, skipped: int, step: int) -> dict[str, float]:
    counts = train.order(recipe.seed, recipe.batch).rows_of_parts((step + skipped) * recipe.batch)
    return {f"rows/{name}": float(count) for name, count in counts.items()}


def _alive(session: Session, event: StepEvent) -> None:
    session.console.tick(event.step)
    session.heartbeat.step = event.step
    session.heartbeat("step")
    fault_injection.strike("step", jax.process_index())
    fault_injection.strike(f"step:{event.step}", jax.process_index())


def _keepers(
    session: Session,
    ready: RunSetup,
    start: Start,
    due: Callable[[int], bool],
    hooks_state: Callable[[], JsonObject],
    sync: Callable[[], None],
) -> tuple[Keep, Keep]:
    """What saves a state as a checkpoint, and what copies it to the memory of the hosts."""
    store, warned = ready.store, set[str]()
    conditions = partial(provenance.conditions_of, start.now, session.recipe, ready.train, start.batches_skipped)

    def part(number: int, state: State, metrics: Mapping[str, float]) -> tuple[State, JsonObject]:
        pending = due(number) and not metrics
        about = conditions(number, pending, hooks_state(), session.log.saving(number))
        return saved(state, ready.assembly.layout.declared), about

    def proof(checksum: StateChecksum) -> Sequence[int]:
        sync()  # the metrics up to this step are on disk before a restart can resume from it
        return checksum.checksum()

    def warn_once(what: str, text: str) -> None:
        if what not in warned:
            warned.add(what)
            session.console.warn(text)

    def save(number: int, state: State, metrics: Mapping[str, float], checksum: StateChecksum) -> None:
        refuse_changed(ready.train, ready.test)
        store.save(number, *part(number, state, metrics), metrics, partial(proof, checksum))
        session.log.committed(store.committed)
        if store.took > (grace := session.recipe.checkpoint.grace):
            text = f"a save takes {store.took:.0f} s; a preempted machine has {grace:.0f} s (checkpoint.grace)"
            warn_once("grace", text)

    def copy(number: int, state: State, metrics: Mapping[str, float], checksum: StateChecksum) -> None:
        assert ready.copies
        if problem := ready.copies.problem():
            warn_once("copies", f"{problem}; the run resumes from its checkpoints")
        ready.copies.save(number, *part(number, state, metrics), proof(checksum))

    return save, copy
