"""Find where a start of a run begins: the newest undamaged checkpoint, restored bit for bit, or step 0."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from dtrain.assembly.assemble import Assembly
from dtrain.assembly.checksum import state_checksum
from dtrain.assembly.state import State, completed, create_state, saved
from dtrain.checkpoint.copies import Copies
from dtrain.checkpoint.manifest import CorruptCheckpoint
from dtrain.checkpoint.store import Store, all_agree
from dtrain.core import fault_injection
from dtrain.core.errors import CheckpointError, DataError, NotFinite
from dtrain.core.types import JsonObject
from dtrain.data.source import UNKNOWN, Source
from dtrain.models.distillation import TEACHER
from dtrain.models.lora import BASE
from dtrain.track.console import Console
from dtrain.train.provenance import resume_guarantee
from dtrain.train.record import Record
from dtrain.weights.initial import PARTS, Initial
from dtrain.weights.read import leaves_by_path


@dataclass(frozen=True)
class Start:
    """Where a start of a run resumes."""

    step: int = 0
    batches_skipped: int = 0
    """Batches that rollbacks skipped: step k trains on batch k + batches_skipped."""
    eval_pending: bool = False
    """Whether an evaluation was due at this step and was skipped."""
    guard_state: JsonObject = field(default_factory=lambda: {"skipped": 0, "losses": []})
    """State of the loss guard."""
    progress: JsonObject = field(default_factory=dict)
    """State of what watches metrics of evaluations."""
    step_s: float = 0.0
    """Seconds that the steps up to this one took."""
    now: JsonObject = field(default_factory=dict)
    """Everything that the numbers of this start depend on; see `provenance.conditions`."""
    saved: bool = True
    """Whether it is a checkpoint, or a copy in memory."""


def first_state(
    assembly: Assembly,
    store: Store,
    train: Source,
    now: JsonObject,
    console: Console,
    log: Record,
    initial: Mapping[str, Initial] = {},
    copies: Copies | None = None,
) -> tuple[State, Start]:
    """The state to start from: the newest undamaged checkpoint, or a new state, initialised sharded; before them a copy
    in memory, if there are `copies` and one is not older.

    `now` is everything that the numbers of this start depend on. No batch before the record's `next_batch` is used.
    Raises CheckpointError if the run has saved a step but has no checkpoint any more, DataError if the data changed.
    """
    reached = log.reached
    if copies and (found := _copied(assembly, copies, store, train, now, console, log, initial)):
        return found
    if store.untouched():
        if reached:
            message = f"run.json records a checkpoint of step {reached}, but the run folder has no checkpoint"
            raise CheckpointError(message, "mount or restore the folder, or start a new run with name=...")
        return _new_state(assembly, initial, now, console, log)
    with log.clock("restore"):
        fault_injection.strike("restore", jax.process_index())
        while newest := store.newest(console.warn):
            refuse_other_data(newest.conditions, train)
            try:
                state = store.restore(newest.step, saved(assembly.shapes, assembly.layout.declared))
                others = {name: leaf for part in initial.values() for name, leaf in part.read().items()}
                state = completed(state, assembly.layout.declared, others)
                if list(state_checksum(newest.step, state).checksum()) != list(newest.checksum):
                    raise CorruptCheckpoint("the restored values do not have the checksum of the saved ones")
            except (CorruptCheckpoint, NotFinite) as error:  # a state that is not finite is never saved
                store.set_aside(newest.step, str(error), console.warn)
                continue
            start = _start(newest.step, newest.conditions, log.next_batch, now)
            if newest.step < reached and not store.damaged(reached):
                message = f"run.json records a checkpoint of step {reached}, which is missing"
                console.warn(f"{message}; the run resumes from step {newest.step}")
            if line := other_rows(newest.conditions, assembly.recipe.batch, start):
                console.warn(line)
            for line in _report(start, resume_guarantee(newest.conditions, now, assembly.recipe, newest.step)):
                console.say(line, "green")
            return state, start
    return _new_state(assembly, initial, now, console, log)


def _copied(
    assembly: Assembly,
    copies: Copies,
    store: Store,
    train: Source,
    now: JsonObject,
    console: Console,
    log: Record,
    initial: Mapping[str, Initial],
) -> tuple[State, Start] | None:
    """The newest state that the hosts have in memory, unless there is a newer checkpoint."""
    with log.clock("restore"):
        newest = copies.newest(above=max(store.steps(), default=0) - 1)
        if newest is None:
            return None
        if newest.conditions["settings"] != json.loads(json.dumps(now["settings"])):
            console.warn("the copies in memory are of a run with other settings, and are not used")
            copies.clear()
            return None
        refuse_other_data(newest.conditions, train)
        shapes = saved(assembly.shapes, assembly.layout.declared)
        state = jax.tree.unflatten(jax.tree.structure(shapes), copies.restore(newest.step))
        others = {name: leaf for part in initial.values() for name, leaf in part.read().items()}
        state, same = completed(state, assembly.layout.declared, others), False
        with suppress(NotFinite):  # no such state is copied
            same = list(state_checksum(newest.step, state).checksum()) == list(newest.checksum)
        if not all_agree(same, jax.process_count()):  # each process has read its own part
            copies.clear()
            console.warn(f"the copy of step {newest.step} in memory does not have its checksum, and is not used")
            return None
        start = replace(_start(newest.step, newest.conditions, log.next_batch, now), saved=False)
        for line in _report(start, resume_guarantee(newest.conditions, now, assembly.recipe, newest.step)):
            console.say(line, "green")
        return state, start


def _new_state(
    assembly: Assembly, initial: Mapping[str, Initial], now: JsonObject, console: Console, log: Record
) -> tuple[State, Start]:
    """A new state, with the parameters that come from elsewhere (`init`, a teacher)."""
    given: dict[str, jax.Array] = {}
    records: JsonObject = {}
    unsaved = {name for name, param in leaves_by_path(assembly.layout.declared).items() if not param.saved}
    for name, part in initial.items():
        values = part.read()
        given |= values
        now = dict(now) | ({"imported": part.origin} if name in ("", BASE) else {})
        records |= {name: part.record(values)} if unsaved & values.keys() else {}
        now |= {PARTS: records} if records else {}
        for line in part.lines:
            console.say(line, "green" if line == part.lines[0] else "yellow")
    return create_state(assembly.make, assembly.shapes, given), Start(0, log.next_batch, now=now)


def _start(step: int, conditions: JsonObject, next_batch: int, now: JsonObject) -> Start:
    batches_skipped = max(conditions["batches_skipped"], next_batch - step)
    now = dict(now) | {key: conditions[key] for key in ("imported", PARTS, BASE, TEACHER) if key in conditions}
    return Start(
        step,
        batches_skipped,
        conditions["evaluation_pending"],
        guard_state=conditions["guard_state"],
        progress=conditions.get("progress", {}),
        step_s=conditions.get("step_s", 0.0),
        now=now,
    )


def _report(start: Start, promised: list[str]) -> list[str]:
    """Lines that state where the run resumes, and what that means for its numbers (`provenance.promise`)."""
    if start.step == 0 and "imported" in start.now:
        return [f"starting from the parameters of {start.now['imported']}"]
    skipped = f"; {start.batches_skipped} batches skipped" if start.batches_skipped else ""
    head = f"resumed from step {start.step}{'' if start.saved else ', a copy in memory'}"
    if len(promised) == 1:
        return [f"{head} ({promised[0]}{skipped})"]
    return [f"{head}{skipped}; {promised[0]}", *promised[1:]]


def other_rows(saved: JsonObject, batch: int, start: Start) -> str:
    """Which examples a run that resumes with another batch uses again, or never; empty if its batch is the same.

    The examples of step n are those from n x batch on, in the order of the seed, whatever the steps before used.
    """
    before = saved.get("settings", {}).get("batch", batch)
    steps = start.step + start.batches_skipped
    used, begins = steps * before, steps * batch
    if used == begins:
        return ""
    what = (
        f"the {begins - used:,} after these are skipped" if begins > used else f"{used - begins:,} of them come again"
    )
    ways = "accumulate and the learning rate change a step without this; or begin another run: init: {run: ...}"
    return f"batch: was {before}, now {batch}: {used:,} examples were used, and {what}; {ways}"


def refuse_other_data(saved: Mapping[str, object], train: Source) -> None:
    if saved["data"] not in (train.fingerprint, UNKNOWN):
        was = f"the run was trained on {saved['data']}, the recipe now gives {train.fingerprint}"
        hint = "restore the same examples, or give this run another name: name=..."
        raise DataError(f"the data changed: {was}", hint, "E-DATA-CHANGED")


def compare(assembly: Assembly, store: Store, state: State, step: int, console: Console) -> None:
    """Restore the dry run's checkpoint and compare every bit with the state in memory."""
    declared = assembly.layout.declared
    restored = store.restore(step, saved(assembly.shapes, declared))
    same = jax.tree.map(_same_bits, saved(state, declared), restored)
    leaves = jax.tree.leaves(same)
    assert all(leaves), "the restored state differs from the saved one"
    values = sum(leaf.size for leaf in jax.tree.leaves(state))
    console.say(f"dry run: {step} steps, a save and a restore; {values:,} values equal bit for bit", "green")


def _same_bits(a: jax.Array, b: jax.Array) -> bool:
    pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
    return all(np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes() for x, y in pairs)
