"""Build the hooks that are called after each step, in their order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax

from dtrain.core import fault_injection
from dtrain.data.batch import Batch
from dtrain.data.mixture import Mixed
from dtrain.data.source import Source, refuse_changed
from dtrain.parallel.devices import are_fake
from dtrain.recipe.recipe import Recipe
from dtrain.track.tracker import Sample
from dtrain.train import provenance
from dtrain.train.assembly import Assembly
from dtrain.train.checksum import StateChecksum
from dtrain.train.hooks import Evaluation, Log, Saving, bytes_per_token
from dtrain.train.input import eval_batches
from dtrain.train.loop import Hook, StepEvent
from dtrain.train.loss_guard import LossGuard
from dtrain.train.prepare import Ready
from dtrain.train.profile import Profiler
from dtrain.train.questions import Questioner
from dtrain.train.reporting import reporter
from dtrain.train.resume import Start
from dtrain.train.save_timer import SaveTimer
from dtrain.train.session import Session
from dtrain.train.state import State, saved
from dtrain.train.watch import Watch


@dataclass(frozen=True)
class Hooks:
    """The hooks of one attempt."""

    alive: Hook
    guard: LossGuard
    logging: Log
    evaluation: Evaluation
    saving: Saving
    watch: Watch
    profiler: Profiler
    """Of process 0; in other processes it is not called."""

    def ends(self, step: int) -> bool:
        """Whether a call of several steps ends at this step, the same in every process."""
        return self.evaluation.due(step) or self.saving.due_by_step(step) or self.profiler.ends(step)

    def used(self, step: int) -> bool:
        """Whether the state after this step is used. With several processes, all must call this after every call."""
        lead = jax.process_index() == 0
        return self.saving.due(step) or self.evaluation.due(step) or (lead and self.profiler.waits(step))

    @property
    def ordered(self) -> list[Hook]:
        """In the order of their calls: the guard comes before the hooks that log or save a loss that it refuses."""
        profiler = [self.profiler] if jax.process_index() == 0 else []
        return [self.alive, *profiler, self.watch, self.guard, self.logging, self.evaluation, self.saving]


def step_hooks(session: Session, ready: Ready, start: Start, end: int) -> Hooks:
    """The hooks of an attempt that starts at `start` and ends with step `end`."""
    assembly, recipe, faked = ready.assembly, session.recipe, are_fake(jax.devices())
    skipping, often = recipe.guard.not_finite == "skip", recipe.checkpoint
    span = (start.step, end)
    report, samples, sync = reporter(
        assembly, session.place, session.console, session.log, session.stack, span=span, planned=ready.planned
    )
    logging = Log(1 if session.dry else recipe.track.every, report, session.clock, skipping)
    if isinstance(ready.train, Mixed):
        logging.sources = tuple(ready.train.parts)
        logging.counts = partial(_rows_of_sources, ready.train, recipe, start.batches_skipped)
    held_out = partial(_held_out, assembly, ready.test, 1 if session.dry else None)
    agreed = session.interrupt.agreed
    evaluation = Evaluation(
        recipe.evaluate,
        ready.evaluate,
        held_out,
        log=logging,
        clock=session.clock,
        bytes_per_token=bytes_per_token(ready.test),
        bytes_of_sources=_bytes_of_sources(ready.test),
        questions=_questioner(session, ready, samples),
        stop=agreed,
        one_at_a_time=faked,
    )
    guard = LossGuard(recipe.guard, start.batches_skipped, lambda step: saving.due(step) or evaluation.due(step))
    guard.recall(start.guard_state)
    save = _saver(session, ready, start, due=lambda step: evaluation.due(step) or step == end, guard=guard, sync=sync)
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
    )
    watch = Watch(session.clock, logging.every, recipe.data.load.workers, session.console.warn)
    profiler = Profiler(session.place, ready.step.as_text, recipe.profile, session.clock, session.console.say)
    return Hooks(
        partial(_alive, session),
        guard,
        logging,
        evaluation,
        saving,
        watch=session.stack.enter_context(watch),
        profiler=profiler,
    )


def _held_out(assembly: Assembly, test: Source, limit: int | None) -> Iterator[tuple[str, Batch]]:
    """The batches of the held-out examples, of each source of a mixture in turn."""
    parts = test.completed() if isinstance(test, Mixed) else {"": test}
    for name, source in parts.items():
        yield from ((name, batch) for batch in eval_batches(assembly, source, limit))


def _bytes_of_sources(test: Source) -> dict[str, float]:
    """Bytes of text for each token of each source of a mixture; 0 if not known."""
    parts = test.completed() if isinstance(test, Mixed) else {}
    return {name: bytes_per_token(part) or 0.0 for name, part in parts.items()}


def _rows_of_sources(train: Mixed, recipe: Recipe, skipped: int, step: int) -> dict[str, float]:
    counts = train.order(recipe.seed, recipe.batch).counts((step + skipped) * recipe.batch)
    return {f"rows/{name}": float(count) for name, count in zip(train.parts, counts.tolist(), strict=True)}


def _questioner(session: Session, ready: Ready, report: Callable[[int, Sequence[Sample]], None]) -> Questioner | None:
    section = session.recipe.evaluate
    if not ready.questions or session.dry:
        return None
    return Questioner(ready.assembly, ready.questions, section.tokens, session.place.path / "answers.jsonl", report)


def _alive(session: Session, event: StepEvent) -> None:
    session.console.tick(event.step)
    session.heartbeat.step = event.step
    session.heartbeat("step")
    fault_injection.strike("step", jax.process_index())
    fault_injection.strike(f"step:{event.step}", jax.process_index())


def _saver(
    session: Session, ready: Ready, start: Start, due: Callable[[int], bool], guard: LossGuard, sync: Callable[[], None]
) -> Callable[[int, State, Mapping[str, float], StateChecksum], None]:
    store, warned = ready.store, []
    about = partial(provenance.about, start.now, session.recipe, ready.train, start.batches_skipped)

    def save(number: int, state: State, metrics: Mapping[str, float], checksum: StateChecksum) -> None:
        refuse_changed(ready.train, ready.test)
        eval_pending = due(number) and not metrics

        def proof() -> Sequence[int]:
            sync()  # the metrics up to this step are on disk before a restart can resume from it
            return checksum.checksum()

        part = saved(state, ready.assembly.layout.declared)
        store.save(number, part, about(number, eval_pending, guard.state, session.log.saving(number)), metrics, proof)
        session.log.committed(store.committed)
        if store.took > (grace := session.recipe.checkpoint.grace) and not warned:
            text = f"a save takes {store.took:.0f} s; a preempted machine has {grace:.0f} s (checkpoint.grace)"
            warned.append(session.console.warn(text))

    return save
