"""The record of a run, run.json: its versions and devices, its times, and how it ended."""

import importlib.metadata
import platform
import subprocess
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import jax

from dtrain import __version__
from dtrain.core import heartbeat, signals
from dtrain.core.errors import DtrainError, NotFinite, TakenOver, user_error
from dtrain.core.files import overwrite
from dtrain.core.metrics import Metric, plain
from dtrain.core.run_dir import RECOMPUTED, STEP_PARTS, STOPPED_BY_USER, Folder, saved_steps, step_seconds
from dtrain.core.types import Device, JsonObject
from dtrain.recipe.load import lasting_text, recipe_digest
from dtrain.recipe.recipe import Recipe
from dtrain.train.loss_guard import Rollback
from dtrain.train.recipe_check import AS_WRITTEN
from dtrain.train.timers import Clock


def total(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Seconds by section, of earlier starts and of this one."""
    return {name: round(before.get(name, 0.0) + now.get(name, 0.0), 3) for name in sorted(before.keys() | now.keys())}


def steps_changed(seconds: Mapping[str, float], change: float) -> dict[str, float]:
    """`change` of the time of steps, spread over the parts of a step in proportion to their seconds."""
    parts = {part: seconds[part] for part in STEP_PARTS if seconds.get(part, 0.0) > 0}
    whole = sum(parts.values())
    return {part: change * value / whole for part, value in parts.items()} if parts else {STEP_PARTS[0]: change}


def earlier(old: JsonObject) -> dict[str, float]:
    """Seconds of earlier starts by section; of steps, only those that a checkpoint saved."""
    seconds = dict(old.get("seconds", {}))
    spent = step_seconds(seconds)
    if not spent or "step_s_saved" not in old:
        return seconds
    changes = steps_changed(seconds, old["step_s_saved"] - spent)
    return seconds | {part: seconds[part] + change for part, change in changes.items()}


def lost(old: JsonObject, latest: heartbeat.Heartbeat | None, start: float) -> dict[str, float]:
    """Seconds lost so far, by cause, including the gap before this start, which began at `start` (Unix time).

    Work after run.json was last written is recomputed (`recomputed_s`); after the last heartbeat the run was down.
    """
    so_far = dict(old.get("lost", {}))
    if not old:
        return so_far
    killed, written = old.get("state") == "running", old.get("written", start)
    last = min(max(written, latest.at if killed and latest else written), start)
    spent = step_seconds(old.get("seconds", {}))
    recomputed = last - written + max(spent - old.get("step_s_saved", spent), 0.0)
    for name, seconds in ((RECOMPUTED, recomputed), (gap(old), start - last)):
        if seconds > 0:
            so_far[name] = round(so_far.get(name, 0.0) + seconds, 3)
    return so_far


DESCRIBED = (
    "recipe", "main_metric", AS_WRITTEN, "steps", "higher_is_better", "units", "topology", "data", "classes", "fitted",
)  # fmt: skip
"""Keys of run.json that say what the saved steps were trained with."""

REFUSED = (2, 3, 4)
"""Exit codes of a start after which a user changes something: the recipe, the machine or the data was wrong."""


def trained_before(old: JsonObject) -> JsonObject:
    """The record of earlier starts; none if they were refused before the first step, so that the run begins now."""
    spent = step_seconds(old.get("seconds", {}))
    refused = old.get("state") == "failed" and old.get("exit_code") in REFUSED
    return {} if refused and not (old.get("step") or spent) else old


def gap(old: JsonObject) -> str:
    """The key of the time between the last start of a run and the next: a pause if the run waited for its user."""
    paused = old["state"] == "finished" or (old["state"] == "stopped" and old.get("stopped_by") in STOPPED_BY_USER)
    return "pause_s" if paused else f"down_{'killed' if old['state'] == 'running' else old['state']}_s"


def process_start() -> float:
    """Seconds since this process was started by the `dtrain` command; 0 in another program."""
    listener = signals.current()
    return time.perf_counter() - listener.began if listener and listener.began else 0.0


CLOSE = 5.0
"""Seconds that a process which must exit at once waits for the lock on run.json."""
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "grain")


@dataclass
class Record:
    """The contents of run.json. Times accumulate over restarts."""

    values: JsonObject
    run_dir: Folder
    lead: bool
    """Whether this is process 0, which alone writes."""
    clock: Clock = field(default_factory=Clock)
    before: dict[str, float] = field(default_factory=dict)
    """Seconds that earlier starts of the run spent in each section."""
    step_s: dict[int, float] = field(default_factory=dict)
    """Seconds spent in steps, up to each saved step."""
    ids: dict[str, str] = field(default_factory=dict)
    """Ids that trackers gave to this run."""
    held: JsonObject | None = None
    """What the first step of this start will change of a run that has saved steps; None once it has begun. A start
    that is refused before changes neither the recipe of such a run nor what is known of its data and metrics."""
    recipe: str = ""
    """The text of this start's recipe."""
    finished: JsonObject | None = None
    """The record of the start before, if that finished the run: it stays if this start is refused."""
    lock: "threading.RLock" = field(default_factory=threading.RLock)
    """Protects run.json: a signal may be handled in another thread."""

    def about(
        self,
        devices: list[Device],
        mesh: Mapping[str, int],
        steps: int,
        metrics: Iterable[Metric],
        classes: Sequence[str] = (),
        fitted: JsonObject | None = None,
        data: JsonObject | None = None,
    ) -> None:
        """Record the devices, the mesh, the number of steps, the metrics that the model declares, the names of the
        data's classes, what was computed from the examples to train on, and their numbers."""
        found = {
            "steps": steps,
            **plain(metrics),
            "topology": {
                "platform": devices[0].platform,
                "device": devices[0].device_kind,
                "devices": len(devices),
                "processes": jax.process_count(),
                "mesh": dict(mesh),
            },
        }
        self.describe(found | {"data": data, "classes": list(classes), "fitted": fitted})
        self.write()

    def describe(self, values: JsonObject) -> None:
        """Record what this start trains with; of a run that has saved steps, once it has begun."""
        (self.values if self.held is None else self.held).update(values)

    def changed(self, changes: Sequence[str], length: Sequence[object]) -> None:
        """Record in what the recipe differs from that of the starts before, and the steps and epochs that it had."""
        assert self.held is not None
        self.held["changes"] = [{"recipe": list(changes), "length": list(length)}]

    def _begin(self, step: int) -> None:
        """Put the recipe of this start, which trains from `step` on, in place of that of the starts before."""
        if self.held is None:
            return
        changes = [{"step": step} | change for change in self.held.pop("changes", [])]
        self.values |= self.held | {"changes": [*self.values["changes"], *changes]}
        self.held = None
        self.write()  # before recipe.yaml: killed in between, that is still the recipe of the saved steps
        if self.lead:
            overwrite(self.run_dir.recipe, self.recipe)

    def resumed(
        self, step: int, step_s: float, batches_skipped: int = 0, *, trains: bool = True, saved: bool = True
    ) -> None:
        """Record the step that the run resumes from, and how many batches the steps after it are ahead.

        `step_s`: seconds that the steps up to it took. `trains`: whether there is anything left to do; then the run's
        recipe is from here on that of this start. `saved`: whether the step is a checkpoint.

        Only these count as step time. The difference from what run.json recorded is time that is recomputed, or was
        assumed to be and is not.
        """
        change = step_s - step_seconds(self._seconds())
        self._add_steps(change)
        if RECOMPUTED in self.values["lost"]:
            self.values["lost"][RECOMPUTED] = round(max(self.values["lost"][RECOMPUTED] - change, 0.0), 3)
        kept = [skip for skip in self.values.get("skips", ()) if skip["step"] < step]
        before = kept[-1]["batches_skipped"] if kept else 0
        again = [] if batches_skipped == before else [{"step": step, "batches_skipped": batches_skipped}]
        self.values["skips"] = [*kept, *again]
        if trains:
            self._begin(step)
        self.saving(step)
        if saved:
            self.committed(step)

    def saving(self, step: int) -> float:
        """Seconds spent in steps so far; also recorded for this step, whose state is about to be saved."""
        self.step_s[step] = step_seconds(self._seconds())
        return self.step_s[step]

    def committed(self, step: int | None) -> None:
        """Record the step that a restart would resume from."""
        if step is not None:
            self.values["step"], self.values["step_s_saved"] = step, self.step_s[step]
            self.write()

    @property
    def reached(self) -> int:
        """The newest step that was saved."""
        return self.values["step"]

    @property
    def next_batch(self) -> int:
        """The first batch that may be used after rollbacks: earlier ones were trained on or skipped."""
        return self.values["next_batch"]

    def rolled_back(self, rollback: Rollback, budget: int) -> None:
        """Record a rollback. Raises NotFinite if there were `budget` of them already."""
        if self.values["rollbacks"] >= budget:
            raise NotFinite(
                f"{rollback.message}; the run was rolled back {budget} times before (guard.budget)", rollback.hint
            )
        discarded = step_seconds(self._seconds()) - self.values["step_s_saved"]
        self._add_steps(-discarded)
        self.values["lost"][RECOMPUTED] = round(self.values["lost"].get(RECOMPUTED, 0.0) + discarded, 3)
        self.values["rollbacks"] += 1
        self.values["next_batch"] = rollback.batch
        self.write()

    def finished_early(self, reason: str, stop: JsonObject) -> None:
        """Record that the run is finished before its last step, and the recipe's section `stop`."""
        self.values["early"] = {"reason": reason, "stop": stop}

    def end(self, state: str, reason: str, code: int) -> None:
        """Record how the run ended."""
        with self.lock:
            self.values |= {"state": state, "reason": reason, "exit_code": code, "ended": time.time()}
            self.write()

    def close(self, state: str, reason: str, code: int) -> int:
        """Record how the run ended unless recorded already, and keep the lock, so that no other thread writes any more.

        Returns the recorded exit code.
        """
        if self.lock.acquire(timeout=CLOSE) and self.values["exit_code"] is None:
            with suppress(OSError, DtrainError):
                self.end(state, reason, code)
                if self.lead:
                    with self.run_dir.log.open("a") as file:
                        file.write(f"stopped: {reason}\n")
        recorded = self.values["exit_code"]
        return code if recorded is None else recorded

    def write(self) -> None:
        """Write run.json, in process 0."""
        if self.lead:
            update = {"seconds": self._seconds(), "tracker_ids": self.ids, "written": time.time()}
            with self.lock:
                refused = self.held is not None and self.values["state"] not in ("running", "finished")
                kept = self.finished if refused and self.finished else self.values | update
                self.run_dir.write_record(kept)

    def _seconds(self) -> dict[str, float]:
        """Seconds by section, over all starts."""
        return total(self.before, self.clock.now())

    def _add_steps(self, seconds: float) -> None:
        """Change the time of steps by this much."""
        for part, change in steps_changed(self._seconds(), seconds).items():
            self.clock.add(part, change)


@contextmanager
def run_record(run_dir: Folder, recipe: Recipe, lead: bool) -> Iterator[Record]:
    """A record that is written to run.json at the start and at the end, however the run ends."""
    recorded, before = run_dir.read_record(), process_start()
    old, text = trained_before(recorded), lasting_text(recipe)
    held = bool(saved_steps(run_dir.checkpoints)) and run_dir.recipe.exists()
    described: JsonObject = {"recipe": recipe_digest(text), "main_metric": recipe.checkpoint.best}
    start = time.time() - before
    values = {
        "name": recipe.name,
        "state": "running",
        "reason": "",
        "exit_code": None,
        "step": old.get("step", 0),
        "started": old.get("started", start),
        "ended": None,
        "starts": old.get("starts", 0) + 1,
        "lost": lost(old, heartbeat.read(run_dir.heartbeat(0)), start),
        "step_s_saved": old.get("step_s_saved", 0.0),
        "rollbacks": old.get("rollbacks", 0),
        "next_batch": old.get("next_batch", 0),
        "changes": list(old.get("changes", [])),
        "skips": list(old.get("skips", [])),
        "pure_trace": old.get("pure_trace", ""),
        "compiled_before": "compiled_from_cache" in old or old.get("compiled_before", False),
        "versions": versions(),
        "git": _git(),
    }
    values |= {key: recorded[key] for key in DESCRIBED if key in recorded} if held else described
    log = Record(
        values,
        run_dir,
        lead,
        before=earlier(old),
        ids=dict(recorded.get("tracker_ids", {})),
        held=described if held else None,
        recipe=text,
        finished=recorded if recorded.get("state") == "finished" else None,
    )
    log.clock.add("start", before)
    if lead:
        if not held:
            overwrite(run_dir.recipe, text)
        log.write()
    try:
        yield log
    except TakenOver:
        raise  # another run has taken over the folder and its record
    except BaseException as error:
        with suppress(OSError, DtrainError):  # the disk may be full or missing
            _failed(log, error)
        raise
    log.end("finished", log.values.get("early", {}).get("reason") or "all steps done", 0)


def _failed(log: Record, error: BaseException) -> None:
    """Record an error in run.json and log.txt, with its exit code."""
    known = user_error(error)
    code = known.exit_code if known else DtrainError.exit_code
    state = {0: "stopped", 75: "stopped", 130: "aborted"}.get(code, "failed")
    reason = known.message if known else f"{type(error).__name__}: {error}"
    log.end(state, reason, code)
    if log.lead:
        text = str(known) if known else "".join(traceback.format_exception(error)).rstrip()
        with log.run_dir.log.open("a") as file:
            file.write(f"{'stopped' if state == 'stopped' else 'error'}: {text}\n")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change the numbers."""
    installed = {"python": platform.python_version(), "dtrain": __version__}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def _git() -> str:
    """The git commit of the working folder; empty if it is not a git repository."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
