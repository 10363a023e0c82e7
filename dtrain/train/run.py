"""A training run, from top to bottom."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import jax

from dtrain.assembly.assemble import assemble, one_step_per_call
from dtrain.assembly.checksum import state_checksum
from dtrain.assembly.input import refuse_broken_contract, train_batches
from dtrain.assembly.state import State
from dtrain.core.errors import NotFinite, RecipeError
from dtrain.core.process_info import launch_id
from dtrain.core.run_control import RunControl
from dtrain.core.run_dir import Folder, folder
from dtrain.inference.open_run import OpenRun
from dtrain.recipe.load import load, plain_part, refuse_conflicts
from dtrain.recipe.packages import missing
from dtrain.recipe.recipe import Recipe
from dtrain.recipe.sizes import with_sizes
from dtrain.track.console import Console
from dtrain.train.locate import located
from dtrain.train.loop import Calls, loop
from dtrain.train.loss_guard import Rollback
from dtrain.train.recipe_check import as_written, finished
from dtrain.train.resume import compare, first_state
from dtrain.train.session import Session, opened
from dtrain.train.start import Hooks, RunSetup, prepare, step_hooks

DRY_STEPS = 3


def run(
    recipe: Recipe,
    runs: Path | str = "runs",
    console: Console | None = None,
    *,
    allow_changes: bool = False,
    dry: bool = False,
    control: RunControl | None = None,
) -> Folder | None:
    """Train to the end, from the newest checkpoint if there is one. Returns the run folder.

    Returns None if the run is already finished. `dry` runs a few steps, a save and a restore. `control`, already
    started, delivers stop requests and limits. Raises RecipeError if sections of the recipe do not agree,
    EnvironmentFault if it needs a package that is missing, and Stopped after saving, when the run was asked to stop.
    """
    refuse_conflicts(recipe)
    if absent := missing(recipe):
        raise absent
    run_dir, console = folder(Path(runs), recipe.name), console or Console()
    with ExitStack() as stack:
        if jax.process_index() == 0:
            run_dir.prepare()
            console.log = run_dir.log
            stack.callback(console.close)
        written = as_written(recipe)
        if finished(run_dir, recipe) or finished(run_dir, recipe := with_sizes(recipe)):
            console.say(f"{recipe.name} is already finished: `dtrain report {run_dir.path}` shows it", "green")
            early = run_dir.read_record().get("early")
            more = "launch up --allow-changes steps=..." if launch_id() else "--extend 20epochs (or 500steps)"
            longer = "stop.patience=... (more), or stop=null" if early else more
            console.say(f"to train longer: {longer}; to start again from step 0, give the run another name: name=...")
            return None
        start = opened(recipe, run_dir, console, allow_changes=allow_changes, dry=dry, control=control)
        session = stack.enter_context(start)
        session.log.describe(written)
        ready = prepare(session)
        while rollback := _attempt(session, ready):
            session.log.rolled_back(rollback, recipe.guard.budget)
            console.warn(f"{rollback.message}: rolling back to the newest checkpoint, skipping the batches since then")
    return run_dir


def run_and_open(
    recipe: Recipe | Path | str,
    runs: Path | str = "runs",
    *,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> OpenRun:
    """Train to the end, from the newest checkpoint if there is one, and open the run; open it if it is finished.

    `recipe`: one that `dtrain.load` gives, a file, or the name of one that comes with dtrain. RecipeError if its
    sections do not agree; Stopped, after saving, if the run was asked to stop.
    """
    if isinstance(recipe, Recipe) and overrides:
        raise RecipeError("overrides go with a file or a name, not with a recipe", "dtrain.load(path, overrides)")
    recipe = recipe if isinstance(recipe, Recipe) else load(recipe, overrides)
    run(recipe, runs, console)
    return OpenRun(folder(Path(runs), recipe.name))


@contextmanager
def _locating(session: Session, ready: RunSetup) -> Iterator[None]:
    """With `guard.nan: locate`, the error of a loss that is not finite names the operation."""
    try:
        yield
    except NotFinite as error:
        if session.recipe.guard.nan == "locate" and jax.process_count() == 1:
            session.console.warn(
                f"{error.message}; the steps since the newest saved one are repeated to find the cause"
            )
            with session.clock("locate"):
                error.message = "\n".join([error.message, *_located(session, ready)])
            error.hint = error.hint.partition("; guard.nan")[0]
        raise


def _located(session: Session, ready: RunSetup) -> list[str]:
    store, assembly, step = ready.store, ready.assembly, ready.step
    if assembly.recipe.engine.steps_per_call > 1:
        recipe = one_step_per_call(session.recipe)
        assembly = assemble(recipe, jax.devices(), ready.train.example, assembly.steps, assembly.frozen)
        step = assembly.compile(assembly.train())
    store.wait()
    quiet = Console(silent=True)
    state, start = first_state(
        assembly, store, ready.train, now=ready.now, console=quiet, log=session.log, initial=ready.initial
    )
    first, last = start.step + start.batches_skipped, assembly.steps + start.batches_skipped
    with closing(train_batches(assembly, ready.train, first, last, session.console.warn)) as batches:
        return located(assembly, step, state, batches, range(start.step + 1, assembly.steps + 1))


def _attempt(session: Session, ready: RunSetup) -> Rollback | None:
    """Train from the newest checkpoint to the end, or until the loss guard demands a rollback."""
    with _locating(session, ready), ExitStack() as stack:
        session = dataclasses.replace(session, stack=stack)
        assembly, store, steps = ready.assembly, ready.store, ready.assembly.steps
        session.clock.switch("start")
        state, start = first_state(
            assembly,
            store,
            ready.train,
            now=ready.now,
            console=session.console,
            log=session.log,
            initial=ready.initial,
            copies=ready.copies,
        )
        if unchecked := refuse_broken_contract(assembly, ready.evaluate, ready.test, state):
            session.console.warn(unchecked)
        with session.clock("compile"):
            # compile the checksum now: the first save may have little time
            jax.block_until_ready(state_checksum(start.step, state).sums)
        end = min(steps, start.step + DRY_STEPS) if session.dry else steps
        trains = start.step < end or start.eval_pending
        session.resumed(start, steps, trains=trains)

        hooks = step_hooks(session, ready, start, end)
        if not session.dry:
            session.interrupt.phase = "training"
        skipped = start.batches_skipped
        try:
            with session.console.progress(start.step, steps), session.clock.training():
                hooks.logging.begin(start.step)
                if jax.process_index() == 0:
                    hooks.profiler.begin(start.step)
                if start.eval_pending:
                    measured = hooks.evaluation.measure(start.step, state)
                    if measured is None:
                        raise session.interrupt.end(start.step, steps, ready.exchange)
                    # what a decision changes is saved later: another start from this checkpoint must measure again
                    store.note(start.step, measured, pending=hooks.progress.decides)
                    state = hooks.progress.after(start.step, state, measured)
                last = start.step if hooks.progress.stopped else end
                calls = Calls(range(start.step + 1, last + 1), session.recipe.engine.steps_per_call, hooks.ends)
                batches = train_batches(
                    assembly, ready.train, start.step + skipped, last + skipped, session.console.warn, calls
                )
                state, stopped = loop(
                    ready.step,
                    state,
                    session.stack.enter_context(closing(batches)),
                    calls=calls,
                    hooks=hooks.ordered,
                    stop=session.interrupt.agreed,
                    used=hooks.used,
                    clock=session.clock,
                    one_at_a_time=hooks.saving.one_at_a_time,
                )
        except Rollback as rollback:
            with session.clock("save"), suppress(NotFinite):  # a pending save of a state that is not finite
                store.wait()
            ready.forget_copies()  # they may be of the steps that are rolled back
            return rollback.with_traceback(None)  # frames of the traceback would keep the state in memory
        _end(session, ready, hooks, state, end, stopped=stopped)
        return None


def _end(session: Session, ready: RunSetup, hooks: Hooks, state: State, end: int, *, stopped: bool) -> None:
    """Wait until the last step is saved. Raises Stopped if it is not the end of the run."""
    assembly, store, steps = ready.assembly, ready.store, ready.assembly.steps
    if not stopped:
        session.interrupt.phase = "finishing"
    with session.clock("save"):
        store.wait()
    ready.forget_copies()
    session.log.committed(store.committed)
    if ready.planned and hooks.logging.step_ms:
        session.console.say(ready.planned.against(statistics.median(hooks.logging.step_ms)))
    if session.dry:
        compare(assembly, store, state, end, session.console)
    elif early := hooks.progress.stopped:
        session.log.finished_early(early, plain_part(session.recipe.stop))
        session.console.say(f"stopped early: {early}", "green")
    elif stopped and (hooks.saving.saved < steps or hooks.evaluation.abandoned):
        raise session.interrupt.end(hooks.saving.saved, steps, ready.exchange)
