"""run.json: what a run was, where its time went, and how it ended."""

import importlib.metadata
import platform
import subprocess
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import jax

from dtrain.core import heartbeat
from dtrain.core.errors import DtrainError, NotFinite, Taken, user_error
from dtrain.core.run_dir import Folder, overwrite
from dtrain.recipe.load import text
from dtrain.recipe.recipe import Recipe
from dtrain.train.loss_guard import Rollback
from dtrain.train.timers import Clock

CLOSE = 5.0
"""Seconds that a process which has to leave at once waits for run.json."""
PACKAGES = ("dtrain", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "grain")


@dataclass
class Record:
    """What run.json will say. Times add up over restarts."""

    values: dict[str, Any]
    place: Folder
    lead: bool
    clock: Clock = field(default_factory=Clock)
    before: dict[str, float] = field(default_factory=dict)
    """Seconds that earlier starts of the run spent in each section."""
    step_s: dict[int, float] = field(default_factory=dict)
    """Seconds spent in steps up to each that was saved."""
    ids: dict[str, str] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)
    """Held while run.json is written: a signal may be handled in another thread."""

    def about(
        self,
        devices: list[Any],
        mesh: Mapping[str, int],
        steps: int,
        rising: Mapping[str, bool],
        classes: Sequence[str] = (),
    ) -> None:
        """Note what the run runs on, how long it is, which metrics the model declares to rise or fall, and the
        names of the data's classes where it has them."""
        self.values |= {
            "steps": steps,
            "rising": dict(rising),
            "topology": {
                "platform": devices[0].platform,
                "device": devices[0].device_kind,
                "devices": len(devices),
                "processes": jax.process_count(),
                "mesh": dict(mesh),
            },
        }
        if classes:
            self.values["classes"] = list(classes)
        self.write()

    def resumed(self, step: int, step_s: float) -> None:
        """Note the step that the run goes on from. Only the seconds of the steps up to it count."""
        run_record = step_s - self._seconds().get("step", 0.0)
        self.clock.add("step", run_record)
        if "done again" in self.values["lost"]:
            self.values["lost"]["done again"] = round(max(self.values["lost"]["done again"] - run_record, 0.0), 3)
        self.saving(step)
        self.committed(step)

    def saving(self, step: int) -> float:
        """Seconds spent in steps by now, when the state after this one is about to be saved."""
        self.step_s[step] = self._seconds().get("step", 0.0)
        return self.step_s[step]

    def committed(self, step: int | None) -> None:
        """Note the step that a restart would go on from."""
        if step is not None:
            self.values["step"], self.values["step_s_kept"] = step, self.step_s[step]
            self.write()

    @property
    def reached(self) -> int:
        """The newest step that was ever saved."""
        return self.values["step"]

    @property
    def next_batch(self) -> int:
        """The first batch that may be used: those before were passed over, or trained on."""
        return self.values["next_batch"]

    def rolled_back(self, rollback: Rollback, budget: int) -> None:
        """Note that the run goes back. NotFinite where it did so too often."""
        if self.values["went_back"] >= budget:
            raise NotFinite(
                f"{rollback.message}; the run went back {budget} times before (guard.budget)", rollback.hint
            )
        thrown = self._seconds().get("step", 0.0) - self.values["step_s_kept"]
        self.clock.add("step", -thrown)
        self.values["lost"]["done again"] = round(self.values["lost"].get("done again", 0.0) + thrown, 3)
        self.values["went_back"] += 1
        self.values["next_batch"] = rollback.batch
        self.write()

    def end(self, state: str, reason: str, code: int) -> None:
        """Note how it ended."""
        with self.lock:
            self.values |= {"state": state, "reason": reason, "exit_code": code, "ended": time.time()}
            self.write()

    def close(self, state: str, reason: str, code: int) -> int:
        """Note how it ended, if that is not noted yet, and let no other thread write any more; the exit code."""
        if self.lock.acquire(timeout=CLOSE) and self.values["exit_code"] is None:
            with suppress(OSError):
                self.end(state, reason, code)
                if self.lead:
                    with self.place.log.open("a") as file:
                        file.write(f"stopped: {reason}\n")
        noted = self.values["exit_code"]
        return code if noted is None else noted

    def write(self) -> None:
        """Bring run.json up to date."""
        if self.lead:
            update = {"seconds": self._seconds(), "tracker_ids": self.ids, "written": time.time()}
            with self.lock:
                self.place.write_record(self.values | update)

    def _seconds(self) -> dict[str, float]:
        """By section, over all starts."""
        before, now = self.before, self.clock.now()
        names = sorted(before.keys() | now.keys())
        return {name: round(before.get(name, 0.0) + now.get(name, 0.0), 3) for name in names}


@contextmanager
def run_record(place: Folder, recipe: Recipe, lead: bool) -> Iterator[Record]:
    """Keep run.json true while the run goes on, however it ends."""
    old = place.read_record()
    values = {
        "name": recipe.name,
        "state": "running",
        "reason": "",
        "exit_code": None,
        "step": old.get("step", 0),
        "started": old.get("started", time.time()),
        "ended": None,
        "starts": old.get("starts", 0) + 1,
        "lost": _lost(old, heartbeat.read(place.heartbeat(0))),
        "step_s_kept": old.get("step_s_kept", 0.0),
        "went_back": old.get("went_back", 0),
        "next_batch": old.get("next_batch", 0),
        "pure_trace": old.get("pure_trace", ""),
        "versions": versions(),
        "git": _git(),
    }
    log = Record(values, place, lead, before=_counted(old), ids=dict(old.get("tracker_ids", {})))
    if lead:
        overwrite(place.recipe, text(recipe))
        log.write()
    try:
        yield log
    except Taken:
        raise  # the record is the other run's now
    except BaseException as error:
        with suppress(OSError):  # of a disk that is full, or gone
            _failed(log, error)
        raise
    log.end("finished", "all steps done", 0)


def _failed(log: Record, error: BaseException) -> None:
    """Note an error in run.json and log.txt, by the mapping that gives the exit code."""
    known = user_error(error)
    code = known.exit_code if known else DtrainError.exit_code
    state = {0: "stopped", 75: "stopped", 130: "aborted"}.get(code, "failed")
    reason = known.message if known else f"{type(error).__name__}: {error}"
    log.end(state, reason, code)
    if log.lead:
        text = str(known) if known else "".join(traceback.format_exception(error)).rstrip()
        with log.place.log.open("a") as file:
            file.write(f"{'stopped' if state == 'stopped' else 'error'}: {text}\n")


def _lost(old: Mapping[str, Any], latest: heartbeat.Heartbeat | None) -> dict[str, float]:
    """Seconds lost between starts of the run, by cause, the gap before this one added.

    What was done since run.json was written is done again; from the last sign of life on, nothing was done.
    """
    found, now = dict(old.get("lost", {})), time.time()
    if not old:
        return found
    killed, written = old.get("state") == "running", old.get("written", now)
    last = min(max(written, latest.at if killed and latest else written), now)
    spent = old.get("seconds", {}).get("step", 0.0)
    again = last - written + max(spent - old.get("step_s_kept", spent), 0.0)
    for name, seconds in (
        ("done again", again),
        (f"down, {'killed' if killed else old['state']}", now - last),
    ):
        if seconds > 0:
            found[name] = round(found.get(name, 0.0) + seconds, 3)
    return found


def _counted(old: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of earlier starts; of steps, those that were saved."""
    seconds = dict(old.get("seconds", {}))
    return seconds | ({"step": old["step_s_kept"]} if "step" in seconds and "step_s_kept" in old else {})


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that bear on the numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _git() -> str:
    """The commit of the folder that the run was started in, if it is one of git."""
    try:
        asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()
