"""One start of a run: its folder, lock, record and signal handling, opened in order and closed in reverse."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import jax

from dtrain.core import signals
from dtrain.core.errors import DtrainError
from dtrain.core.heartbeat import HeartbeatWriter
from dtrain.core.lease import Lease, hold_lease
from dtrain.core.run_control import RunControl
from dtrain.core.run_dir import Folder
from dtrain.recipe.recipe import Recipe
from dtrain.track.console import Console
from dtrain.track.notifier import Notifier, notifying
from dtrain.train.interrupt import Interrupt, listening
from dtrain.train.recipe_check import refuse_changes, saved_length
from dtrain.train.record import Record, run_record
from dtrain.train.resume import Start
from dtrain.train.timers import Clock


@dataclass(frozen=True)
class Session:
    """The resources of one start of a run."""

    recipe: Recipe
    run_dir: Folder
    console: Console
    log: Record
    heartbeat: HeartbeatWriter
    interrupt: Interrupt
    stack: ExitStack
    """Closes what this start opens later; it is closed before the resources opened here."""
    dry: bool
    holds: Callable[[], None]
    """Raises if this run no longer holds the lock of its folder."""
    notifier: Notifier

    @property
    def clock(self) -> Clock:
        return self.log.clock

    def resumed(self, start: Start, steps: int, *, trains: bool) -> None:
        """Record where this start resumes, of so many steps, and whether anything is left to do."""
        self.log.resumed(start.step, start.step_s, start.batches_skipped, trains=trains, saved=start.saved)
        self.heartbeat.resumed(start.step)
        self.notifier.resumed(start.step, steps)


@contextmanager
def opened(
    recipe: Recipe, run_dir: Folder, console: Console, *, allow_changes: bool, dry: bool, control: RunControl | None
) -> Iterator[Session]:
    """Open a session on a run folder. On exit, how the run ended is written into run.json and sent as a notification.

    Raises RecipeError if the folder has a run of another recipe, Locked if another process holds its lock.
    """
    lead = jax.process_index() == 0
    with ExitStack() as stack:
        notify = recipe.track.notify if lead and not dry else None
        notifier = stack.enter_context(notifying(notify, run_dir, console.warn, recipe.guard.patience))
        changes = refuse_changes(run_dir, recipe, allow_changes)
        interrupt = stack.enter_context(listening(console.say))
        with signals.held():
            lease = stack.enter_context(hold_lease(run_dir.lease, console.warn)) if lead else None
            before = saved_length(run_dir) if changes else ()
            log = stack.enter_context(run_record(run_dir, recipe, lead))
            if changes:
                log.changed(changes, before)
                console.say("the recipe is changed as allowed; once it trains, the next start needs the same changes:")
                for line in changes:
                    console.say(f"  {line}")
            interrupt.noted = lambda by: log.values.update(stopped_by=by)
            interrupt.close = notifier.closing(partial(_close_now, log, lease, control, dry))
        if control:
            control.report_share(notifier.spent)
            interrupt.attach(control)
        patience = recipe.guard.patience * recipe.engine.steps_per_call  # a heartbeat comes once for each call
        beats = HeartbeatWriter(run_dir.heartbeat(jax.process_index()), patience)
        log.clock.entered = heartbeat = stack.enter_context(closing(beats))
        holds = lease.check if lease else lambda: None
        yield Session(
            recipe,
            run_dir,
            console,
            log=log,
            heartbeat=heartbeat,
            interrupt=interrupt,
            stack=stack,
            dry=dry,
            holds=holds,
            notifier=notifier,
        )


def _close_now(
    log: Record, lease: Lease | None, control: RunControl | None, dry: bool, state: str, reason: str, code: int
) -> int:
    """Clean up before the process exits at once. Returns the exit code."""
    code = log.close(state, reason, code)
    if control:
        control.close()
    if lease:
        with suppress(DtrainError, OSError, ValueError):
            lease.release()
    if dry:
        shutil.rmtree(log.run_dir.path, ignore_errors=True)
        with suppress(OSError):
            log.run_dir.path.parent.rmdir()
    return code
