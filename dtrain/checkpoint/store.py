"""The checkpoints of one run: orbax writes the sharded state; writing the manifest commits it as a checkpoint.

    checkpoints/120/state/...        arrays, written in place by orbax
    checkpoints/120/MANIFEST.json    digests of these files, written last: it commits the checkpoint
    checkpoints/.incomplete-120      marker that exists while that folder is written or deleted
    checkpoints/.bad-100-.../        a damaged step, renamed and never deleted

A save renames no folder: a bucket without atomic folder renames does that object by object.
"""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax

from dtrain.checkpoint import disk, incomplete, manifest
from dtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from dtrain.checkpoint.partial import UNREAD, is_partial, restore_part
from dtrain.checkpoint.policy import Checkpoint
from dtrain.core import fault_injection
from dtrain.core.errors import CheckpointError, EnvironmentFault, Locked, cause, way_out
from dtrain.core.files import overwrite
from dtrain.core.metrics import Metric
from dtrain.core.run_dir import is_step, saved_steps
from dtrain.models.nn.param import dotted

TRANSIENT = {
    errno.EAGAIN, errno.EBUSY, errno.ECONNRESET, errno.EINTR, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip
PAUSES = (0.2, 1.0, 5.0)
"""Seconds before each retry."""

Result = TypeVar("Result")


def retried(do: Callable[[], Result]) -> Result:
    """The result of `do`, retried after transient errors. Raises the OSError if it persists or is not transient."""
    for pause in PAUSES:
        try:
            return do()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            time.sleep(pause)
    return do()


def differences(stored: Any, shapes: Any) -> list[str]:
    """One line for each array that is missing, unexpected, or of another shape or dtype."""
    have = {dotted(path): _kind(x) for path, x in _leaves(stored.tree)}
    want = {dotted(path): _kind(x) for path, x in _leaves(shapes)}
    have |= {name: _kind(UNREAD) for name in have.keys() & want.keys() if want[name] == _kind(UNREAD)}
    lines = [f"{name}: saved, but not in the recipe" for name in sorted(have.keys() - want.keys())]
    lines += [f"{name}: in the recipe, but not saved" for name in sorted(want.keys() - have.keys())]
    return lines + [
        f"{name}: saved as {have[name][1]}{list(have[name][0])}, the recipe has {want[name][1]}{list(want[name][0])}"
        for name in sorted(have.keys() & want.keys())
        if have[name] != want[name]
    ]


def _kind(leaf: Any) -> tuple[tuple[int, ...], str]:
    return ((), "unread") if leaf is UNREAD else (tuple(leaf.shape), str(leaf.dtype))


def _leaves(tree: object) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "dtype"))[0]


POLL, PATIENCE = 0.01, 1200.0
"""Seconds between polls for the files of other processes, and the longest wait for them."""


def commit(folder: Path, pending: Manifest, rank: int, processes: int, holds: Callable[[], None]) -> None:
    """Called in every process once all files of the step's `folder` are written.

    `holds` raises if this run no longer holds the lock of its folder. Raises OSError if other processes do not finish
    their part in time, or if files changed meanwhile.
    """
    state = folder / "state"
    mine = retried(lambda: manifest.digests(state, manifest.share(manifest.files_of(state), rank, processes)))
    retried(lambda: overwrite(_part(folder, rank), json.dumps(mine)))
    if rank:
        _until((folder / manifest.NAME).exists, f"process 0 did not commit step {pending.step}")
        return
    parts = [_part(folder, other) for other in range(processes)]
    _until(lambda: all(part.exists() for part in parts), f"not every process digested its part of step {pending.step}")
    files = {f"state/{path}": digest for part in parts for path, digest in json.loads(part.read_text()).items()}
    for part in parts:
        part.unlink()
    if {f"state/{path}" for path in manifest.files_of(state)} != files.keys():
        raise OSError(f"files of step {pending.step} were added or removed while they were digested")
    retried(lambda: fault_injection.strike("save:commit", rank))
    holds()
    retried(lambda: replace(pending, files=files).write(folder))
    _sync(folder)
    fault_injection.strike("save:manifest", rank)
    incomplete.end(folder.parent, pending.step)
    _sync(folder.parent)
    fault_injection.strike("save:committed", rank)


def all_agree(mine: bool, processes: int) -> bool:
    """Whether `mine` is true in every process. A barrier: each process waits for the others."""
    if processes == 1:
        return mine
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.array([mine])).all())


def _part(folder: Path, rank: int) -> Path:
    return folder / f"digests-{rank}.json"


def _until(done: Callable[[], bool], failure: str) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > end:
            raise OSError(failure)
        time.sleep(POLL)


def _sync(path: Path) -> None:
    """fsync a file, or a folder after a rename in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


SLICE = 2**20
"""Fewest bytes of a slice that each replica writes; a smaller array is written by the first one."""


class Arrays:
    """Writes in the background, in place and without a rename; one folder at a time."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        mode = ocp.options.AtomicityMode.COMMIT_FILE
        atomicity = ocp.options.AtomicityOptions(mode=mode, allow_legacy_atomic_rename=True)
        # Orbax's own metadata of arrays is left out: the manifest has a digest of every file.
        # Processes that hold the same values each write a slice of them, if it is large: a program is compiled for each
        # shape of a slice.
        several = jax.process_count() > 1
        arrays = ocp.type_handlers.ArrayHandler(
            use_replica_parallel=several, min_slice_bytes_for_replica_parallel=SLICE if several else None
        )
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        # not compressed: trained floats shrink by a tenth at most, and a save takes twice as long
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
        self._orbax = ocp.AsyncCheckpointer(handler, atomicity_options=atomicity)

    def save(self, place: Path, state: object) -> None:
        """Start to save. The arrays may be donated as soon as this returns."""
        import orbax.checkpoint as ocp

        self._orbax.save(place, args=ocp.args.PyTreeSave(state))

    def wait(self) -> None:
        """Wait until the save is on disk. Raises what it failed with."""
        self._orbax.wait_until_finished()

    def metadata(self, place: Path) -> Any:
        """The tree of what was saved, with shapes and dtypes."""
        return self._orbax.metadata(place).item_metadata

    def restore(self, place: Path, shapes: Any) -> Any:
        """The state with the shardings of `shapes`; arrays that are `...` there are not read."""
        import orbax.checkpoint as ocp

        if is_partial(shapes):
            return restore_part(place, shapes)
        how = ocp.checkpoint_utils.construct_restore_args(shapes)
        return self._orbax.restore(place, args=ocp.args.PyTreeRestore(shapes, how))

    def close(self) -> None:
        """Wait for a pending save and end the threads."""
        self._orbax.close()


ROOM = 1.1
"""Bytes of a checkpoint on disk, with metadata, relative to its arrays: an upper estimate."""
BAD = ".bad-"
"""Prefix of the new name of a damaged step."""

Say = Callable[[str], None]


class Store:
    """The checkpoints in one folder. A context manager: its exit waits for a pending save."""

    def __init__(
        self,
        path: Path,
        policy: Checkpoint,
        *,
        reading: bool = False,
        holds: Callable[[], None] = lambda: None,
        metrics: Iterable[Metric] = (),
    ) -> None:
        """`reading` changes nothing on disk: another process may be saving. `holds` raises if this run no longer holds
        the lock of its folder. `metrics`: those that the model declares.

        Raises EnvironmentFault if the folder cannot be created.
        """
        self._path, self._policy, self._reading, self._holds = path, policy, reading, holds
        self._metrics = tuple(metrics)
        self._rank, self._processes = jax.process_index(), jax.process_count()
        self.committed: int | None = None
        """The last step that this process committed."""
        self.took = 0.0
        """Seconds from the start of that save to its commit."""
        self._saving: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._began = 0.0
        try:
            if not reading and self._rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                incomplete.sweep(path)
        except OSError as error:
            raise EnvironmentFault(f"cannot create checkpoints in {path}: {cause(error)}", way_out(error)) from error
        self._arrays = Arrays()

    def __enter__(self) -> "Store":
        disk.report_once()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._saving and self._saving.ident:  # it never began where there was no memory for a thread
            self._saving.join()
        try:
            self._arrays.close()
        except OSError as error:
            if kind is None:  # else the error that ends the run is reported
                raise EnvironmentFault(f"cannot write to {self._path}: {cause(error)}", way_out(error)) from error

    def steps(self) -> list[int]:
        """Committed steps, newest first."""
        return saved_steps(self._path)

    def refuse_without_room(self, size: int) -> None:
        """Raise EnvironmentFault if the disk has no room for one more checkpoint of `size` bytes."""
        free, needed = shutil.disk_usage(self._path if self._path.is_dir() else self._path.parent).free, size * ROOM
        if self._rank == 0 and free < needed:
            message = f"a checkpoint takes {size / 1e6:,.1f} MB; {self._path} has {free / 1e6:,.1f} MB free"
            raise EnvironmentFault(message, "free disk space, or use another disk: --runs-dir")

    def untouched(self) -> bool:
        """Whether no checkpoint was ever committed here, including damaged ones."""
        return not self.steps() and not any(self._path.glob(f"{BAD}*"))

    def newest(self, say: Say) -> Manifest | None:
        """The manifest of the newest step whose files all match it; None if nothing was ever saved.

        Damaged steps, and other files with the name of a step, are renamed and reported. Raises CheckpointError if
        damaged steps are all there is, EnvironmentFault if the disk cannot be read.
        """
        self._report_unexpected(say)
        for step in self.steps():
            checked, reason = None, "another process found it damaged"
            try:
                checked = retried(partial(manifest.check, self._path / str(step), self._rank, self._processes))
            except CorruptCheckpoint as error:
                reason = str(error)
            except OSError as error:
                raise EnvironmentFault(f"checkpoint {step} cannot be read: {cause(error)}", way_out(error)) from error
            if all_agree(checked is not None, self._processes):
                return checked
            self.set_aside(step, reason, say)
        bad = sorted(path.name for path in self._path.glob(f"{BAD}*"))
        if bad:
            message = f"no checkpoint in {self._path} can be used: {len(bad)} set aside, the newest {bad[-1]}"
            hint = "copy an undamaged checkpoint there, named by its step, or start a new run: name=..."
            raise CheckpointError(message, hint)
        return None

    def damaged(self, step: int) -> bool:
        """Whether a checkpoint of this step was damaged and set aside."""
        return any(self._path.glob(f"{BAD}{step}-*"))

    def _report_unexpected(self, say: Say) -> None:
        """Report entries named as a number that are not checkpoint folders; rename those whose name a save needs."""
        for path in sorted(self._path.iterdir()) if self._path.is_dir() and self._rank == 0 else ():
            if not path.name.isdecimal() or (is_step(path.name) and path.is_dir()):
                continue
            if is_step(path.name) and not self._reading:
                path.rename(self._aside(path.name))
                say(f"{path} is not a checkpoint folder: set aside")
            else:
                say(f"{path} is not a checkpoint folder: ignored")

    def _aside(self, name: str) -> Path:
        return self._path / f"{BAD}{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"

    def set_aside(self, step: int, reason: str, say: Say) -> None:
        """Rename a damaged step, so that it is never restored and never deleted. With `reading`, only report it."""
        if self._reading:
            say(f"checkpoint {step} is damaged and skipped: {reason}")
            return
        if self._rank == 0:
            aside = self._aside(str(step))
            shutil.move(self._path / str(step), aside)  # copies file by file if the file system cannot rename folders
            say(f"checkpoint {step} is damaged and set aside as {aside.name}: {reason}")
        self.committed = None if self.committed == step else self.committed
        all_agree(True, self._processes)  # a barrier: every process waits for the rename

    def save(
        self,
        step: int,
        state: object,
        conditions: Mapping[str, object],
        metrics: Mapping[str, float],
        proof: Callable[[], Sequence[int]] = lambda: (),
    ) -> None:
        """Start to save in the background. The state may be donated as soon as this returns.

        `conditions` and `metrics` are for the manifest. `proof` returns the checksum of the state, or raises if it must
        not be saved; it is called before the commit. Raises what a previous save failed with.
        """
        self.wait()
        if step in self.steps():
            return
        best = {name: value for name, value in metrics.items() if name == self._policy.best}
        pending, self._began = Manifest(step, dict(conditions), best), time.monotonic()
        self._holds()
        with disk.writing(self._path, step, self._holds):
            fault_injection.strike("save:begin", self._rank)
            if self._rank == 0:
                incomplete.begin(self._path, step)
            self._arrays.save(self._path / str(step) / "state", state)
        self._saving = threading.Thread(target=self._finish, args=(pending, proof), name=f"save {step}", daemon=True)
        self._saving.start()

    def note(self, step: int, metrics: Mapping[str, float], pending: bool = False) -> None:
        """Add the metrics of a checkpoint that were measured after its save, and whether its evaluation stays pending,
        for the next start to repeat."""
        best = {name: value for name, value in metrics.items() if name == self._policy.best}
        if self._rank == 0:
            folder = self._path / str(step)
            saved = manifest.read(folder)
            replace(saved, metrics=best, conditions={**saved.conditions, "evaluation_pending": pending}).write(folder)

    def wait(self) -> None:
        """Wait until the pending save is committed. Raises what it failed with, such as EnvironmentFault."""
        if self._saving:
            self._saving.join()
            self._saving = None
        failed, self._failed = self._failed, None
        if failed:
            raise failed

    def restore(self, step: int, shapes: object) -> Any:
        """Restore the state of that step with the shardings of `shapes`, whatever mesh it was saved from.

        Arrays that are `...` in `shapes` are not read. Raises CheckpointError with the differences if the state is of
        another model, optimizer or dtype, EnvironmentFault if an undamaged checkpoint cannot be read.
        """
        place = self._path / str(step) / "state"
        with disk.reading(place):
            unlike = differences(self._arrays.metadata(place), shapes)
        if unlike:
            head = f"checkpoint {self._path / str(step)} does not match this recipe's model and optimizer:"
            raise CheckpointError("\n  ".join([head, *unlike[:8]]), "give this run another name: name=...")
        with disk.reading(place):
            return self._arrays.restore(place, shapes)

    def _finish(self, pending: Manifest, proof: Callable[[], Sequence[int]]) -> None:
        """In a thread: wait for orbax, digest, commit, and delete the steps that the policy does not keep."""
        try:
            with disk.writing(self._path, pending.step, self._holds):
                self._arrays.wait()
                pending = replace(pending, checksum=list(proof()))
                fault_injection.strike("save:digest", self._rank)
                commit(self._path / str(pending.step), pending, self._rank, self._processes, self._holds)
                self.committed, self.took = pending.step, time.monotonic() - self._began
                if self._rank == 0:
                    self._retire()
        except BaseException as error:
            self._failed = error
            with suppress(Locked, OSError):
                if self._rank == 0:
                    disk.discard(self._path, pending.step, self._holds)

    def _retire(self) -> None:
        """Delete the steps that the policy does not keep."""
        ranks = {}
        for step in self.steps():
            with suppress(CorruptCheckpoint):
                ranks[step] = manifest.read(self._path / str(step)).metrics.get(self._policy.best or "")
        for step in self._policy.superfluous(ranks, self._metrics):
            incomplete.retire(self._path, step)
