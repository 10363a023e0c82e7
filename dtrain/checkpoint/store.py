"""Checkpoints of one run: orbax writes the state, each device its own part; a manifest makes it a checkpoint.

    checkpoints/120/state/...        what orbax wrote, in place
    checkpoints/120/MANIFEST.json    digests of it, written last: from then on it is a checkpoint
    checkpoints/.incomplete-120      there while that folder is written or deleted
    checkpoints/.bad-100-.../        a step that was found damaged, set aside and never deleted

No folder is renamed on the way: on a plain bucket that is done object by object.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dtrain.checkpoint import disk, incomplete, manifest
from dtrain.checkpoint.commit import all_agree, commit
from dtrain.checkpoint.differences import differences
from dtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from dtrain.checkpoint.partial import is_partial, restore_part
from dtrain.checkpoint.policy import Checkpoint
from dtrain.checkpoint.retry import retried
from dtrain.core import fault_injection
from dtrain.core.errors import CheckpointError, EnvironmentFault, Locked, cause, way_out
from dtrain.core.run_dir import is_step, saved_steps

ROOM = 1.1
"""Of a checkpoint's arrays: what it takes with all that is written about them."""
BAD = ".bad-"

Say = Callable[[str], None]


class Store:
    """The checkpoints under one folder. Use as a context manager: leaving waits for the save under way."""

    def __init__(
        self,
        path: Path,
        policy: Checkpoint,
        *,
        reading: bool = False,
        holds: Callable[[], None] = lambda: None,
        rising: Mapping[str, bool] | None = None,
    ) -> None:
        """`reading` leaves everything as it is: another process may be saving. `holds` raises where this run
        is no longer the one that may write. `rising`: metrics that the model declares, with whether more is better."""
        import orbax.checkpoint as ocp

        self._path, self._policy, self._reading, self._holds = path, policy, reading, holds
        self._rising, self._within = rising or {}, ExitStack()
        self._rank, self._processes = jax.process_index(), jax.process_count()
        self.committed: int | None = None
        """The last step that this process saw become a checkpoint."""
        self.took = 0.0
        """Seconds from the beginning of that save to its commit."""
        self._saving: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._began = 0.0
        try:
            if not reading and self._rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                incomplete.sweep(path)
        except OSError as error:
            raise EnvironmentFault(f"cannot keep checkpoints in {path}: {cause(error)}", way_out(error)) from error
        mode = ocp.options.AtomicityMode.COMMIT_FILE  # which writes in place
        whole = ocp.options.AtomicityOptions(mode=mode, allow_legacy_atomic_rename=True)
        self._orbax = ocp.StandardCheckpointer(atomicity_options=whole)

    def __enter__(self) -> "Store":
        self._within.enter_context(disk.once())
        return self

    def __exit__(self, *_: object) -> None:
        with self._within:
            if self._saving:
                self._saving.join()
            self._orbax.close()

    def steps(self) -> list[int]:
        """Committed steps, the newest first."""
        return saved_steps(self._path)

    def refuse_without_room(self, size: int) -> None:
        """EnvironmentFault where a checkpoint of so many bytes finds no room beside the one before it."""
        free, needed = shutil.disk_usage(self._path if self._path.is_dir() else self._path.parent).free, size * ROOM
        if self._rank == 0 and free < needed:
            message = f"a checkpoint takes {size / 1e6:,.1f} MB; {self._path} has {free / 1e6:,.1f} MB free"
            raise EnvironmentFault(message, "free some, or keep runs elsewhere: --runs-dir")

    def untouched(self) -> bool:
        """Whether nothing was ever saved here."""
        return not self.steps() and not any(self._path.glob(f"{BAD}*"))

    def newest(self, say: Say) -> Manifest | None:
        """The newest step whose every file is as it was written; None where nothing was ever saved.

        Damaged steps, and other things under a step's name, are set aside and reported. CheckpointError where
        no sound step is left.
        """
        self._strangers(say)
        for step in self.steps():
            found, reason = None, "another process found it damaged"
            try:
                found = retried(partial(manifest.check, self._path / str(step), self._rank, self._processes))
            except CorruptCheckpoint as error:
                reason = str(error)
            except OSError as error:
                raise EnvironmentFault(f"checkpoint {step} cannot be read: {cause(error)}", way_out(error)) from error
            if all_agree(found is not None, self._processes):
                return found
            self.set_aside(step, reason, say)
        bad = sorted(path.name for path in self._path.glob(f"{BAD}*"))
        if bad:
            message = f"no checkpoint in {self._path} can be used: {len(bad)} set aside, the newest {bad[-1]}"
            hint = "put a copy of a sound checkpoint there, under its own step, or start a new run: name=..."
            raise CheckpointError(message, hint)
        return None

    def damaged(self, step: int) -> bool:
        """Whether a checkpoint of this step was found damaged and set aside."""
        return any(self._path.glob(f"{BAD}{step}-*"))

    def _strangers(self, say: Say) -> None:
        """Report what has a number for a name and is no checkpoint; where a save would need that name, move it."""
        for path in sorted(self._path.iterdir()) if self._path.is_dir() and self._rank == 0 else ():
            if not path.name.isdecimal() or (is_step(path.name) and path.is_dir()):
                continue
            if is_step(path.name) and not self._reading:
                path.rename(self._aside(path.name))
                say(f"{path} is no folder of a checkpoint: set aside")
            else:
                say(f"{path} is no folder of a checkpoint: ignored")

    def _aside(self, name: str) -> Path:
        return self._path / f"{BAD}{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"

    def set_aside(self, step: int, reason: str, say: Say) -> None:
        """Rename a damaged step, so that it is never restored and never lost."""
        if self._reading:
            say(f"checkpoint {step} is damaged and skipped: {reason}")
            return
        if self._rank == 0:
            aside = self._aside(str(step))
            shutil.move(self._path / str(step), aside)  # file by file where the file system renames no folders
            say(f"checkpoint {step} is damaged and set aside as {aside.name}: {reason}")
        self.committed = None if self.committed == step else self.committed
        all_agree(True, self._processes)  # every process waits until it is out of the way

    def save(
        self,
        step: int,
        state: Any,
        about: Mapping[str, Any],
        metrics: Mapping[str, float],
        proof: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """Begin to save; the state may be given away as soon as this returns.

        `proof` gives the checksum of the state, or raises where it must not be kept; it is asked before the
        save becomes a checkpoint.
        """
        self.wait()
        if step in self.steps():
            return
        ranked = {name: value for name, value in metrics.items() if name == self._policy.best}
        pending, self._began = Manifest(step, dict(about), ranked), time.monotonic()
        self._holds()
        with disk.writing(self._path, step, self._holds):
            fault_injection.strike("save:begin", self._rank)
            if self._rank == 0:
                incomplete.begin(self._path, step)
            self._orbax.save(self._path / str(step) / "state", state)
        self._saving = threading.Thread(target=self._finish, args=(pending, proof), name=f"save {step}", daemon=True)
        self._saving.start()

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add what was measured of a checkpoint after it was saved: no evaluation is owed any more."""
        ranked = {name: value for name, value in metrics.items() if name == self._policy.best}
        if self._rank == 0:
            folder = self._path / str(step)
            saved = manifest.read(folder)
            replace(saved, metrics=ranked, about={**saved.about, "owed": False}).write(folder)

    def wait(self) -> None:
        """Until the save under way is a checkpoint. EnvironmentFault where it could not become one."""
        if self._saving:
            self._saving.join()
            self._saving = None
        failed, self._failed = self._failed, None
        if failed:
            raise failed

    def restore(self, step: int, shapes: Any) -> Any:
        """The state of that step, laid out as `shapes` says, whatever layout it was saved from; no array that
        `shapes` has as `...` is read.

        CheckpointError lists what differs where the state is of another model, optimizer or dtype;
        EnvironmentFault says why a checkpoint whose bytes are as they were written cannot be read.
        """
        place = self._path / str(step) / "state"
        with disk.reading(place):
            unlike = differences(self._orbax.metadata(place).item_metadata, shapes)
        if unlike:
            head = f"checkpoint {self._path / str(step)} is not of this recipe's model and optimizer:"
            raise CheckpointError("\n  ".join([head, *unlike[:8]]), "give this run another name: name=...")
        with disk.reading(place):
            return restore_part(place, shapes) if is_partial(shapes) else self._orbax.restore(place, shapes)

    def _finish(self, pending: Manifest, proof: Callable[[], Sequence[int]]) -> None:
        """In a thread: wait for orbax, digest, commit, and let go of what need not be kept."""
        try:
            with disk.writing(self._path, pending.step, self._holds):
                self._orbax.wait_until_finished()
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
        """Delete what the policy does not keep."""
        ranks = {}
        for step in self.steps():
            with suppress(CorruptCheckpoint):
                ranks[step] = manifest.read(self._path / str(step)).metrics.get(self._policy.best or "")
        for step in self._policy.superfluous(ranks, self._rising):
            incomplete.retire(self._path, step)
