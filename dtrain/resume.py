"""Where a start of a run goes on: the newest checkpoint that is sound, bit for bit what was saved, or the beginning."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dtrain import faults
from dtrain.assembly import Assembly
from dtrain.checkpoint.manifest import Unsound
from dtrain.checkpoint.store import Store
from dtrain.data.source import Source
from dtrain.errors import CheckpointError, DataError, NotFinite
from dtrain.introduction import mesh_text
from dtrain.parallel.mesh import visible
from dtrain.track.console import Console
from dtrain.train.audit import audit
from dtrain.train.clock import Clock
from dtrain.train.state import State, born


@dataclass(frozen=True)
class Start:
    """Where a start of a run goes on."""

    step: int = 0
    passed: int = 0
    """Batches that were passed over: step k takes batch k + passed."""
    owed: bool = False
    """Whether an evaluation was due at this step and not made."""
    seen: Mapping[str, Any] = field(default_factory=lambda: {"skipped": 0, "losses": []})
    """By the watch over the loss."""
    step_s: float = 0.0
    """Seconds that the steps up to here took."""


def first_state(
    made: Assembly, store: Store, train: Source, console: Console, clock: Clock, reached: int = 0, next_batch: int = 0
) -> tuple[State, Start]:
    """The state to go on from: the newest checkpoint, or born sharded. No batch before `next_batch` is used.

    CheckpointError where the run had saved step `reached` and nothing of it is there any more.
    """
    if store.untouched():
        if reached:
            message = f"step {reached} was saved, and no checkpoint is where it was"
            raise CheckpointError(message, "mount or put back the folder, or begin anew with name=...")
        return born(made.make, made.shapes), Start(0, next_batch)
    with clock("restore"):
        faults.strike("restore", jax.process_index())
        while newest := store.newest(console.warn):
            _refuse_other_data(newest.about, train)
            try:
                state = store.restore(newest.step, made.shapes)
                if list(audit(newest.step, state).checksum()) != list(newest.checksum):
                    raise Unsound("the values that it gives are not those that were saved")
            except (Unsound, NotFinite) as error:  # what is not finite was never saved
                store.set_aside(newest.step, str(error), console.warn)
                continue
            told = newest.about
            passed = max(told["passed"], next_batch - newest.step)
            start = Start(newest.step, passed, told["owed"], told["seen"], told.get("step_s", 0.0))
            over = f"; {start.passed} batches passed over" if start.passed else ""
            console.say(f"resumed from step {newest.step} ({_promise(told, made)}{over})", "green")
            return state, start
    return born(made.make, made.shapes), Start(0, next_batch)


def _refuse_other_data(saved: Mapping[str, Any], train: Source) -> None:
    if saved["data"] != train.fingerprint:
        was = f"the run has seen {saved['data']}, now there is {train.fingerprint}"
        hint = "put the same examples back, or give this run another name: name=..."
        raise DataError(f"the data changed: {was}", hint)


def _promise(saved: Mapping[str, Any], made: Assembly) -> str:
    """What a restart keeps: sums are taken in the same order only by the same mesh and processes."""
    processes = jax.process_count()
    if (saved["mesh"], saved["processes"]) == (visible(made.layout.sizes), processes):
        return "same mesh and processes: the same bits"
    was = f"mesh {mesh_text(saved['mesh'])}, processes {saved['processes']}"
    return f"saved on {was}: the same numbers but for rounding"


def compare(made: Assembly, store: Store, state: State, step: int, console: Console) -> None:
    """Read the dry run's checkpoint back and hold every bit against the state in memory."""
    restored = store.restore(step, made.shapes)
    same = jax.tree.map(_same_bits, state, restored)
    leaves = jax.tree.leaves(same)
    assert all(leaves), "the restored state differs from the saved one"
    values = sum(leaf.size for leaf in jax.tree.leaves(state))
    console.say(f"dry run: {step} steps, a save and a restore; {values:,} values equal bit for bit", "green")


def _same_bits(a: jax.Array, b: jax.Array) -> bool:
    pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
    return all(np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes() for x, y in pairs)
