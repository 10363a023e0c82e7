"""Where a start of a run goes on: the newest checkpoint that is sound, bit for bit what was saved, or the beginning."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dtrain.assembly import Assembly
from dtrain.checkpoint.manifest import Unsound
from dtrain.checkpoint.store import Store
from dtrain.data.source import Source
from dtrain.errors import DataError
from dtrain.introduction import mesh_text
from dtrain.parallel.mesh import visible
from dtrain.track.console import Console
from dtrain.train.audit import audit
from dtrain.train.clock import Clock
from dtrain.train.state import State, born


def first_state(made: Assembly, store: Store, train: Source, console: Console, clock: Clock) -> tuple[State, int]:
    """The state to go on from, and its step: the newest checkpoint, or born sharded."""
    if store.untouched():
        return born(made.make, made.shapes), 0
    with clock("restore"):
        while newest := store.newest(console.warn):
            _refuse_other_data(newest.about, train)
            try:
                state = store.restore(newest.step, made.shapes)
                if list(audit(newest.step, state).checksum()) != list(newest.checksum):
                    raise Unsound("the values that it gives are not those that were saved")
            except Unsound as error:
                store.set_aside(newest.step, str(error), console.warn)
                continue
            console.say(f"resumed from step {newest.step} ({_promise(newest.about, made)})", "green")
            return state, newest.step
    return born(made.make, made.shapes), 0


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
