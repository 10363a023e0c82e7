"""What one start of a run has at hand, and what has to be done where it ends at once."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import jax

from dtrain.checkpoint.store import Store
from dtrain.core.errors import DtrainError
from dtrain.core.heartbeat import HeartbeatWriter
from dtrain.core.lease import Lease
from dtrain.core.run_control import RunControl
from dtrain.core.run_dir import Folder
from dtrain.data.source import Source
from dtrain.recipe.recipe import Recipe
from dtrain.track.console import Console
from dtrain.track.notifier import Notifier
from dtrain.train.assembly import Assembly
from dtrain.train.interrupt import Interrupt
from dtrain.train.planned import PlanComparison
from dtrain.train.record import Record
from dtrain.train.save_timer import FromFirst
from dtrain.train.timers import Clock


@dataclass(frozen=True)
class Session:
    """What one start of a run has at hand."""

    recipe: Recipe
    place: Folder
    console: Console
    log: Record
    heartbeat: HeartbeatWriter
    interrupt: Interrupt
    stack: ExitStack
    dry: bool
    holds: Callable[[], None]
    """Raises where this run may no longer write."""
    notifier: Notifier

    @property
    def clock(self) -> Clock:
        return self.log.clock


@dataclass(frozen=True)
class Ready:
    """What does not change however often the run is rolled back."""

    assembly: Assembly
    train: Source
    test: Source
    step: jax.stages.Compiled
    evaluate: jax.stages.Compiled
    store: Store
    planned: PlanComparison | None
    exchange: FromFirst
    now: Mapping[str, Any]
    """What the numbers of this start depend on."""


def close_now(
    log: Record, lease: Lease | None, control: RunControl | None, dry: bool, state: str, reason: str, code: int
) -> int:
    """What has to be done where the process ends at once; the exit code."""
    code = log.close(state, reason, code)
    if control:
        control.close()
    if lease:
        with suppress(DtrainError, OSError, ValueError):
            lease.release()
    if dry:
        shutil.rmtree(log.place.path, ignore_errors=True)
        with suppress(OSError):
            log.place.path.parent.rmdir()
    return code


def note_committed(session: Session, store: Store) -> None:
    """Write the newest saved step into run.json, where that can be done."""
    with suppress(DtrainError, OSError):
        session.log.committed(store.committed)
