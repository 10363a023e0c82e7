"""Train on a launch target, kill processes and hosts of the run there at random moments; measure how it recovers."""

import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtrain.core.counts import counted
from dtrain.core.errors import EnvironmentFault
from dtrain.core.heartbeat import Heartbeat
from dtrain.core.run_dir import MANIFEST, Folder
from dtrain.launch import registry
from dtrain.launch.job import LaunchJob, LaunchTarget, MachineState, Say
from dtrain.runtime.verify import Certificate, Guarantee, checksum, same_bits
from dtrain.track.summary import summarise

POLL = 0.1
"""Seconds between two requests for the state of a run."""
PATIENCE = 1800.0
"""Seconds to wait for a run that is expected to train: its hosts may be queued for."""
SETTLED = 30.0
"""Seconds for which a run must have failed on all machines to count as failed: schedulers report the end of a job that
they run again."""


@dataclass(frozen=True)
class Recovery:
    """A process or a host that was killed, and how the run came back."""

    step: int
    """The last step that was seen before."""
    what: str
    by: str
    """What started it again."""
    seconds: float
    """Until the run had trained a step again."""
    caught_up: float
    """Until it was at that step again, or had ended."""
    repeated: int
    """Steps that were trained again."""

    def __str__(self) -> str:
        back = f"trains again after {self.seconds:.1f} s ({self.by}), there again after {self.caught_up:.1f} s"
        return f"step {self.step}, {self.what}: {back}; {self.repeated} steps again"


@dataclass(frozen=True)
class Drill(Certificate):
    """What was verified on a launch target, and how long each recovery took."""

    target: str = ""
    recoveries: tuple[Recovery, ...] = ()
    goodput: float = 0.0
    """The part of the run's time that was spent on steps which were not trained again."""
    undisturbed: float = 0.0
    """The same of the run that nothing was killed of."""
    cost: float = 0.0
    """Seconds by which the run was longer than the undisturbed one."""
    lost: Mapping[str, float] | None = None
    """Seconds by cause, as in the record of the run."""

    def lines(self) -> list[str]:
        """The certificate as lines of text."""
        head, *rows = super().lines()
        each = self.cost / max(len(self.recoveries), 1)
        return [
            f"{head}; on {self.target}",
            *rows,
            *(f"  {recovery}" for recovery in self.recoveries),
            f"  goodput {self.goodput:.1%}, undisturbed {self.undisturbed:.1%}; the kills cost {self.cost:.1f} s, "
            f"{each:.1f} s each",
        ]


@dataclass(frozen=True)
class Launches:
    """Runs on a launch target, whose records are in `runs` while they are alive."""

    target: LaunchTarget
    runs: Path
    hosts: int
    say: Say

    def up(self, job: LaunchJob) -> LaunchJob:
        """Start a run, or what is missing of it."""
        with registry.alone(self.runs, job.name):
            return registry.start(self.runs, self.target, job, None, registry.find(self.runs, job.name), self.say)

    @contextmanager
    def running(self, job: LaunchJob) -> Iterator[LaunchJob]:
        """A run from its start; at the end nothing of it is left but its folder."""
        try:
            yield self.up(job)
        finally:
            if started := registry.find(self.runs, job.name):  # also of a start that was interrupted
                self.target.down(started, lambda _: None)
                registry.forget(self.runs, job.name)

    def beats(self, job: LaunchJob) -> Iterator[tuple[Heartbeat | None, bool]]:
        """The latest heartbeat of the run, and whether the run has ended well; DtrainError if it failed, or if it
        sends none for too long."""
        latest, heard, good = None, time.monotonic(), time.monotonic()
        for rows in self.target.watch(job):
            found, now = rows[0].heartbeat, time.monotonic()
            heard = now if found != latest else heard
            good = good if _failed(rows) else now
            latest = found
            done = all(row.code == 0 for row in rows)
            yield latest, done
            if done:
                return
            if now - good > SETTLED or now - heard > PATIENCE:
                states = "; ".join(f"{row.name}: {row.state} {row.what}" for row in rows)
                why = "failed" if now - good > SETTLED else f"trained no step for {PATIENCE:.0f} s"
                raise EnvironmentFault(f"{job.name} {why}: {states}", self._log(job))
            time.sleep(POLL)

    def _log(self, job: LaunchJob) -> str:
        lines = [f"{machine}: {line}" for machine, line in self.target.logs(job, None, follow=False)]
        return "\n".join(["the end of its output:", *lines[-15:]])

    def fetched(self, job: LaunchJob, into: Path) -> Folder:
        """What the folder of an ended run has of its end: record, metrics, and the manifest of its last step."""
        run = Folder(into / job.name)
        run.path.mkdir()
        for path in (run.record, run.metrics):
            path.write_text(self.target.read(job, path.name))
        last = run.checkpoints / str(run.read_record()["steps"]) / MANIFEST
        last.parent.mkdir(parents=True)
        last.write_text(self.target.read(job, str(last.relative_to(run.path))))
        return run


def _failed(rows: list[MachineState]) -> bool:
    return all(row.code is not None for row in rows) and any(row.code for row in rows)


def drill(launches: Launches, undisturbed: LaunchJob, killed: LaunchJob, kills: int, seed: int) -> Drill:
    """Train the one job undisturbed, kill the other one so many times, and compare. They differ in their name."""
    say = launches.say
    with tempfile.TemporaryDirectory(prefix="dtrain-drill-") as place:
        say("an undisturbed run ...")
        with launches.running(undisturbed) as job:
            for _ in launches.beats(job):
                pass
            straight = launches.fetched(job, Path(place))
        record = straight.read_record()
        chosen = random.Random(seed)
        at = sorted(chosen.sample(range(1, record["steps"]), min(kills, record["steps"] - 1)))
        recoveries: list[Recovery] = []
        with launches.running(killed) as job:
            for number, step in enumerate(at):
                host, whole = chosen.randrange(launches.hosts), number % 2 == 1
                if not (found := _recovery(launches, job, step, host, whole=whole)):
                    break
                say(f"{found} ...")
                recoveries.append(found)
            for _ in launches.beats(job):
                pass
            other = launches.fetched(job, Path(place))
        return _compared(
            straight, other, recoveries, len(at), where=f"{killed.target['kind']}, {counted(launches.hosts, 'host')}"
        )


def _recovery(launches: Launches, job: LaunchJob, step: int, host: int, *, whole: bool) -> Recovery | None:
    """Kill a process or a host when the run has trained this step, and wait until it is there again; None if the run
    ends before."""
    for latest, done in launches.beats(job):
        if done:
            return None
        if latest and latest.step >= max(step, latest.first + 2):
            break
    began = time.monotonic()
    try:
        name = launches.target.fail(job, host, whole=whole)
    except EnvironmentFault:
        if any(done for _, done in launches.beats(job)):  # it ended meanwhile
            return None
        raise
    # the last of the process that was killed, which stays until the next begins; a host may not answer at once
    before = next(latest for latest, _ in launches.beats(job) if latest)
    by = "its supervisor"
    if whole and launches.target.replaces_hosts:
        by = "the scheduler"
    elif whole:
        launches.up(job)
        by = "`dtrain launch up`"
    seconds, first = 0.0, before.step
    for latest, done in launches.beats(job):
        if latest is None:
            continue
        if latest.since <= before.since:
            before = latest
        elif latest.step > latest.first + 1 and not seconds:  # the step before is computed when one is dispatched
            seconds, first = time.monotonic() - began, latest.first
        if done or (seconds and latest.step >= before.step):
            break
    end = time.monotonic() - began
    what = f"{'host' if whole else 'a process on'} {name} killed"
    return Recovery(before.step, what, by, seconds or end, end, max(before.step - first, 0))


def _compared(straight: Folder, other: Folder, recoveries: list[Recovery], kills: int, where: str) -> Drill:
    record = straight.read_record()
    walls = [summarise(run).values for run in (straight, other)]
    found = Drill(
        record["name"].removesuffix("-straight"), record["steps"], record["topology"], record["versions"],
        checksum(straight),
        target=where,
        recoveries=tuple(recoveries),
        goodput=walls[1]["goodput"],
        undisturbed=walls[0]["goodput"],
        cost=walls[1]["wall"] - walls[0]["wall"],
        lost=other.read_record()["lost"],
    )  # fmt: skip
    few = Guarantee(f"killed {kills} times", False, f"only {len(recoveries)} kills came before the run ended")
    found.findings.extend([same_bits(straight, other, len(recoveries)), *([few] if len(recoveries) < kills else [])])
    return found
