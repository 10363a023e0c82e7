"""Build what a start of a run needs before its first step: data, assembly, compiled steps, checkpoint store."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import jax

from dtrain.checkpoint.store import Store
from dtrain.core import fault_injection
from dtrain.core.errors import DataError, DtrainError, RecipeError
from dtrain.core.metrics import Metric, higher_is_better
from dtrain.core.types import JsonObject
from dtrain.data.questions import Question, read_questions
from dtrain.data.source import Source
from dtrain.parallel.compile_cache import Counter
from dtrain.parallel.devices import await_compiled
from dtrain.parallel.engine import Traced
from dtrain.parallel.mesh import mesh_sizes
from dtrain.train import provenance, trace_checks
from dtrain.train.assembly import Assembly, assemble
from dtrain.train.banner import banner
from dtrain.train.elsewhere import elsewhere
from dtrain.train.hooks import bytes_per_token
from dtrain.train.initial import Initial, initial_from
from dtrain.train.planned import PlanComparison, compare_with_plan
from dtrain.train.questions import refuse_without_texts, score_names
from dtrain.train.save_timer import FromFirst
from dtrain.train.session import Session
from dtrain.train.state import saved


def refuse_unmeasured(
    best: str | None,
    evaluate: jax.stages.Compiled,
    bytes_per_token: float | None,
    declared: Iterable[Metric],
    scores: Iterable[str] = (),
) -> None:
    """Raise RecipeError if no evaluation measures `best`, or it is unknown whether higher or lower is better.

    `best`: the recipe's `checkpoint.best`.
    `bytes_per_token`: as in `hooks.evaluated`. `scores`: those of the recipe's questions.
    """
    if best is None:
        return
    sums = jax.tree.unflatten(evaluate.out_tree, range(evaluate.out_tree.num_leaves))
    names = {"eval/loss", *(f"eval/{name}" for name in sums.metrics)}
    names |= {"eval/perplexity"} if bytes_per_token is not None else set()
    names |= {"eval/bits_per_byte"} if bytes_per_token else set()
    names |= {f"eval/{name}" for name in scores}
    if best not in names:
        raise RecipeError(f"checkpoint.best: {best} is not measured", f"one of {', '.join(sorted(names))}")
    if higher_is_better(best, declared) is None:
        short = best.partition("/")[2]
        hint = f"declare it in the model with dtrain.Metric: metrics = (Metric({short!r}, higher_is_better=True),)"
        raise RecipeError(f"checkpoint.best: it is not known whether a higher or a lower {best} is better", hint)


SLOW_COMPILE = 10.0
"""Seconds of compilation from which on it matters that the programs of a restart were not in the cache."""


@dataclass(frozen=True)
class Ready:
    """What stays the same when the run is rolled back."""

    assembly: Assembly
    train: Source
    test: Source
    step: jax.stages.Compiled
    evaluate: jax.stages.Compiled
    store: Store
    planned: PlanComparison | None
    exchange: FromFirst
    now: JsonObject
    """Everything that the numbers of this start depend on; see `provenance.conditions`."""
    questions: Sequence[Question] = ()
    """Those of `evaluate.questions`."""
    initial: Mapping[str, Initial] = field(default_factory=dict)
    """What a start takes from elsewhere; see `initial.elsewhere`."""


def prepare(session: Session) -> Ready:
    """Open the data, assemble and compile both steps, open the store.

    Raises DataError if the model cannot take the held-out data, RecipeError if `checkpoint.best` is not measured,
    EnvironmentFault if the disk has no room for a checkpoint.
    """
    train, test = session.recipe.data.open("train"), session.recipe.data.open("test")
    steps, devices = session.recipe.total_steps(len(train)), jax.devices()
    if (reached := session.log.reached) > steps:
        message = f"{session.place.path} has saved step {reached:,}, and this recipe ends at step {steps:,}"
        hint = f"train longer, for example with steps={reached + steps}; or start again under another name: name=..."
        raise RecipeError(message, hint)
    if unfit := session.recipe.model.mismatch(test.example):
        raise DataError(f"held-out examples: {unfit}", "change the model's sizes, or the data")

    questions = _questions(session)
    assembly = assemble(session.recipe, devices, train.example, steps)
    now, metrics = provenance.conditions(assembly), session.recipe.model.metrics
    epochs = round(steps * session.recipe.batch / len(train), 4)
    session.log.about(
        devices,
        mesh_sizes(assembly.layout.sizes),
        steps,
        metrics,
        classes=getattr(train, "names", ()),
        data={"kind": session.recipe.data.kind, "train": len(train), "test": len(test), "epochs": epochs},
    )
    for line in banner(assembly, train, test, steps, devices):
        session.console.say(line)
    if session.recipe.guard.nan == "locate" and jax.process_count() > 1:
        message = f"guard.nan: locate needs a run of one process, this one has {jax.process_count()}"
        session.console.warn(f"{message}: a loss that is not finite is only reported")
    initial = _initial(session, assembly)
    step, evaluate = _compiled(session, assembly)
    scores = score_names(questions)
    refuse_unmeasured(session.recipe.checkpoint.best, evaluate, bytes_per_token(test), metrics, scores)
    place, policy = session.place.checkpoints.absolute(), session.recipe.checkpoint
    store = Store(place, policy, holds=session.holds, metrics=metrics)
    session.stack.callback(_note_committed, session, store)  # runs after the store has waited for a pending save
    session.stack.enter_context(store)
    shapes = saved(assembly.shapes, assembly.layout.declared)
    store.refuse_without_room(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)))
    return Ready(
        assembly,
        train,
        test,
        step=step,
        evaluate=evaluate,
        store=store,
        planned=compare_with_plan(session.place, assembly, devices),
        exchange=FromFirst(),
        now=now,
        questions=questions,
        initial=initial,
    )


def _questions(session: Session) -> Sequence[Question]:
    """The questions of the recipe. RecipeError if the model cannot answer any."""
    names = session.recipe.evaluate.questions
    if not names:
        return ()
    refuse_without_texts(session.recipe.model, session.recipe.model.kind)
    return read_questions(names)


def _initial(session: Session, assembly: Assembly) -> dict[str, Initial]:
    found, warn = elsewhere(session.recipe, session.place), session.console.warn
    return {part: initial_from(assembly, init, warn, checksum, part) for part, (init, checksum) in found.items()}


def _compiled(session: Session, assembly: Assembly) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """Check the traced training step, then compile the training and the evaluation step."""
    with session.clock("compile"):
        fault_injection.strike("compile", jax.process_index())
        traced, known = assembly.train(), session.log.values["pure_trace"]
        warnings = trace_checks.baked_constants(traced, session.recipe.guard.constants_mb)
        warnings += trace_checks.callbacks(traced)
        warnings += _impure(session, assembly, traced) if session.recipe.guard.purity else []
        build = partial(session.recipe.engine.compile, platform=assembly.layout.platform)
        evaluation = assembly.evaluate()
        # XLA compiles without Python's lock: both programs at the same time
        with Counter() as programs, ThreadPoolExecutor(1) as thread:
            other = thread.submit(build, evaluation)
            step, evaluate = build(traced), other.result()
        await_compiled()
    if known and session.recipe.guard.purity and session.log.values["pure_trace"] == known:  # the same program
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


def _note_committed(session: Session, store: Store) -> None:
    """Write the newest saved step into run.json; errors of the disk are ignored here."""
    with suppress(DtrainError, OSError):
        session.log.committed(store.committed)
