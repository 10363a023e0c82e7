"""Checkpoints of one run: orbax writes the state, each device its own part; a manifest makes it a checkpoint.

    checkpoints/120/state/...        what orbax wrote
    checkpoints/120/MANIFEST.json    digests of it, written last
    checkpoints/.unfinished/         saves under way; a start of the run empties it
    checkpoints/.trash/              steps that are being deleted
    checkpoints/.bad-100-.../        a step that was found damaged, set aside and never deleted

A save becomes a checkpoint by one rename, after everything in it is on disk and digested.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dtrain import faults
from dtrain.checkpoint import manifest
from dtrain.checkpoint.commit import all_agree, commit
from dtrain.checkpoint.differences import differences
from dtrain.checkpoint.manifest import Manifest, Unsound
from dtrain.checkpoint.policy import Checkpoint
from dtrain.checkpoint.retry import retried
from dtrain.errors import CheckpointError, DtrainError, EnvironmentFault, Locked
from dtrain.folder import saved_steps

ROOM = 1.1
"""Of a checkpoint's arrays: what it takes with all that is written about them."""
TRASH, UNFINISHED, BAD = ".trash", ".unfinished", ".bad-"

Say = Callable[[str], None]


class Store:
    """The checkpoints under one folder. Use as a context manager: leaving waits for the save under way."""

    def __init__(
        self, path: Path, policy: Checkpoint, *, reading: bool = False, holds: Callable[[], None] = lambda: None
    ) -> None:
        """`reading` leaves everything as it is: another process may be saving. `holds` raises where this run
        is no longer the one that may write."""
        import orbax.checkpoint as ocp

        self._path, self._policy, self._reading, self._holds = path, policy, reading, holds
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
                _empty(path / TRASH)
                _empty(path / UNFINISHED)
        except OSError as error:
            raise EnvironmentFault(f"cannot keep checkpoints in {path}: {error.strerror}") from error
        self._orbax = ocp.StandardCheckpointer()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
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

        Damaged steps are set aside and told of. CheckpointError where none is left.
        """
        for step in self.steps():
            found, reason = None, "another process found it damaged"
            try:
                found = retried(partial(manifest.check, self._path / str(step), self._rank, self._processes))
            except Unsound as error:
                reason = str(error)
            except OSError as error:
                raise EnvironmentFault(f"checkpoint {step} cannot be looked at: {error}") from error
            if all_agree(found is not None, self._processes):
                return found
            self.set_aside(step, reason, say)
        bad = sorted(path.name for path in self._path.glob(f"{BAD}*"))
        if bad:
            message = f"no checkpoint in {self._path} can be used: {len(bad)} damaged, the newest {bad[-1]}"
            raise CheckpointError(message, "mend one and rename it to its step, or begin anew with name=...")
        return None

    def set_aside(self, step: int, reason: str, say: Say) -> None:
        """Rename a damaged step, so that it is never restored and never lost."""
        if self._reading:
            say(f"checkpoint {step} is damaged and passed over: {reason}")
            return
        if self._rank == 0:
            aside = self._path / f"{BAD}{step}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            (self._path / str(step)).rename(aside)
            say(f"checkpoint {step} is damaged and set aside as {aside.name}: {reason}")
        all_agree(True, self._processes)  # nobody goes on before it is out of the way

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
        told, self._began = Manifest(step, dict(about), ranked), time.monotonic()
        with self._writing(step):
            faults.strike("save:begin", self._rank)
            (self._path / UNFINISHED / str(step)).mkdir(parents=True, exist_ok=True)
            self._orbax.save(self._path / UNFINISHED / str(step) / "state", state)
        self._saving = threading.Thread(target=self._finish, args=(told, proof), name=f"save {step}", daemon=True)
        self._saving.start()

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add what was measured of a checkpoint after it was saved: no evaluation is owed any more."""
        ranked = {name: value for name, value in metrics.items() if name == self._policy.best}
        if self._rank == 0:
            folder = self._path / str(step)
            told = manifest.read(folder)
            replace(told, metrics=ranked, about={**told.about, "owed": False}).write(folder)

    def wait(self) -> None:
        """Until the save under way is a checkpoint. EnvironmentFault where it could not become one."""
        if self._saving:
            self._saving.join()
            self._saving = None
        failed, self._failed = self._failed, None
        if failed:
            raise failed

    def restore(self, step: int, shapes: Any) -> Any:
        """The state of that step, laid out as `shapes` says, whatever layout it was saved from.

        CheckpointError lists what differs where the state is of another model, optimizer or dtype;
        EnvironmentFault says why a checkpoint whose bytes are as they were written cannot be read.
        """
        place = self._path / str(step) / "state"
        with _reading(place):
            unlike = differences(self._orbax.metadata(place).item_metadata, shapes)
        if unlike:
            head = f"checkpoint {self._path / str(step)} is not of this recipe's model and optimizer:"
            raise CheckpointError("\n  ".join([head, *unlike[:8]]), "give this run another name: name=...")
        with _reading(place):
            return self._orbax.restore(place, shapes)

    def _finish(self, told: Manifest, proof: Callable[[], Sequence[int]]) -> None:
        """In a thread: wait for orbax, digest, commit, and let go of what need not be kept."""
        try:
            with self._writing(told.step):
                self._orbax.wait_until_finished()
                told = replace(told, checksum=list(proof()))
                faults.strike("save:digest", self._rank)
                unfinished, final = self._path / UNFINISHED / str(told.step), self._path / str(told.step)
                commit(unfinished, final, told, self._rank, self._processes, self._holds)
                self.committed, self.took = told.step, time.monotonic() - self._began
                if self._rank == 0:
                    self._retire()
                    with suppress(OSError):
                        (self._path / UNFINISHED).rmdir()
        except BaseException as error:
            self._failed = error
            with suppress(Locked, OSError):
                self._holds()  # what another run writes there is its own
                if self._rank == 0:
                    _empty(self._path / UNFINISHED / str(told.step))  # so that a full disk does not stay full
                    (self._path / UNFINISHED).rmdir()

    def _retire(self) -> None:
        """Delete what the policy does not keep, by way of a name that is no step's."""
        ranks = {}
        for step in self.steps():
            with suppress(Unsound):
                ranks[step] = manifest.read(self._path / str(step)).metrics.get(self._policy.best or "")
        trash = self._path / TRASH
        for step in self._policy.superfluous(ranks):
            trash.mkdir(exist_ok=True)
            (self._path / str(step)).rename(trash / str(step))
            faults.strike("retire", self._rank)
        _empty(trash)

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """A fault of the disk as one line."""
        try:
            yield
        except (OSError, ValueError) as error:
            message = f"could not save step {step} to {self._path}: {_first_line(error)}"
            raise EnvironmentFault(message, "checkpoints before it are whole; free the disk and run again") from error


@contextmanager
def _reading(place: Path) -> Iterator[None]:
    try:
        yield
    except DtrainError:
        raise
    except Exception as error:  # orbax raises bare Exception, and much else
        message = f"checkpoint {place.parent} is whole but cannot be restored: {_first_line(error)}"
        raise EnvironmentFault(message, "it is left as it is; look for memory, open files, the file system") from error


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _empty(trash: Path) -> None:
    if trash.is_dir() and not trash.is_symlink():
        shutil.rmtree(trash, ignore_errors=True)
