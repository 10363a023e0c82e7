"""Where a start of a run begins: the newest checkpoint that is sound, bit for bit what was saved, or step 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dtrain.checkpoint.manifest import CorruptCheckpoint
from dtrain.checkpoint.store import Store
from dtrain.core import fault_injection
from dtrain.core.errors import CheckpointError, DataError, NotFinite
from dtrain.data.source import UNKNOWN, Source
from dtrain.track.console import Console
from dtrain.train.assembly import Assembly
from dtrain.train.checksum import state_checksum
from dtrain.train.provenance import promise
from dtrain.train.record import Record
from dtrain.train.state import State, create_state


@dataclass(frozen=True)
class Start:
    """Where a start of a run goes on."""

    step: int = 0
    batches_skipped: int = 0
    """Batches that were passed over: step k takes batch k + passed."""
    eval_pending: bool = False
    """Whether an evaluation was due at this step and not made."""
    seen: Mapping[str, Any] = field(default_factory=lambda: {"skipped": 0, "losses": []})
    """By the watch over the loss."""
    step_s: float = 0.0
    """Seconds that the steps up to here took."""
    now: Mapping[str, Any] = field(default_factory=dict)
    """What the numbers of this start depend on."""


def first_state(
    assembly: Assembly,
    store: Store,
    train: Source,
    now: Mapping[str, Any],
    console: Console,
    log: Record,
) -> tuple[State, Start]:
    """The state to resume from: the newest checkpoint, or initialised sharded. No batch before the record's
    `next_batch` is used. `now` is what the numbers of this start depend on.

    CheckpointError where the run had saved a step and nothing of it is there any more.
    """
    reached = log.reached
    if store.untouched():
        if reached:
            message = f"step {reached} was saved, and no checkpoint is where it was"
            raise CheckpointError(message, "mount or put back the folder, or begin anew with name=...")
        return create_state(assembly.make, assembly.shapes), Start(0, log.next_batch, now=now)
    with log.clock("restore"):
        fault_injection.strike("restore", jax.process_index())
        while newest := store.newest(console.warn):
            _refuse_other_data(newest.about, train)
            try:
                state = store.restore(newest.step, assembly.shapes)
                if list(state_checksum(newest.step, state).checksum()) != list(newest.checksum):
                    raise CorruptCheckpoint("the values that it gives are not those that were saved")
            except (CorruptCheckpoint, NotFinite) as error:  # what is not finite was never saved
                store.set_aside(newest.step, str(error), console.warn)
                continue
            start = _start(newest.step, newest.about, log.next_batch, now)
            if newest.step < reached and not store.damaged(reached):
                message = f"run.json says that step {reached} was saved; its checkpoint is gone"
                console.warn(f"{message}, so the run resumes from step {newest.step}")
            for line in _report(start, promise(newest.about, now, assembly.recipe, newest.step)):
                console.say(line, "green")
            return state, start
    return create_state(assembly.make, assembly.shapes), Start(0, log.next_batch, now=now)


def _start(step: int, about: Mapping[str, Any], next_batch: int, now: Mapping[str, Any]) -> Start:
    batches_skipped = max(about["passed"], next_batch - step)
    now = dict(now) | {"imported": about["imported"]} if "imported" in about else now
    return Start(step, batches_skipped, about["owed"], about["seen"], about.get("step_s", 0.0), now)


def _report(start: Start, kept: list[str]) -> list[str]:
    """What is resumed, and what that keeps of the numbers."""
    if start.step == 0 and "imported" in start.now:
        return [f"starting from the parameters of {start.now['imported']}"]
    over = f"; {start.batches_skipped} batches skipped" if start.batches_skipped else ""
    head = f"resumed from step {start.step}"
    return [f"{head} ({kept[0]}{over})"] if len(kept) == 1 else [f"{head}{over}; {kept[0]}", *kept[1:]]


def _refuse_other_data(saved: Mapping[str, Any], train: Source) -> None:
    if saved["data"] not in (train.fingerprint, UNKNOWN):
        was = f"the run has seen {saved['data']}, now there is {train.fingerprint}"
        hint = "put the same examples back, or give this run another name: name=..."
        raise DataError(f"the data changed: {was}", hint)


def compare(assembly: Assembly, store: Store, state: State, step: int, console: Console) -> None:
    """Read the dry run's checkpoint back and hold every bit against the state in memory."""
    restored = store.restore(step, assembly.shapes)
    same = jax.tree.map(_same_bits, state, restored)
    leaves = jax.tree.leaves(same)
    assert all(leaves), "the restored state differs from the saved one"
    values = sum(leaf.size for leaf in jax.tree.leaves(state))
    console.say(f"dry run: {step} steps, a save and a restore; {values:,} values equal bit for bit", "green")


def _same_bits(a: jax.Array, b: jax.Array) -> bool:
    pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
    return all(np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes() for x, y in pairs)
