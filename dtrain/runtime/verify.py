"""Whether a run keeps its promises: killed at random and resumed it ends with the same bits; other engines and
other numbers of processes and devices give the same losses but for rounding."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtrain.checkpoint import manifest
from dtrain.core import heartbeat
from dtrain.core.errors import DtrainError
from dtrain.core.run_dir import Folder
from dtrain.track.jsonl import read

TOLERANCE = 1e-3
"""How far apart, relatively, the losses of another engine or topology may be at any step."""

PATIENCE = 600.0


@dataclass(frozen=True)
class Promise:
    """One promise, and whether it was kept."""

    what: str
    kept: bool
    shown: str


@dataclass(frozen=True)
class Certificate:
    """What was tried and what came of it."""

    name: str
    steps: int
    topology: Mapping[str, Any]
    versions: Mapping[str, str]
    checksum: str
    """Of the last state's bits."""
    findings: list[Promise] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether every promise was."""
        return all(finding.kept for finding in self.findings)

    def values(self) -> dict[str, Any]:
        """For a program."""
        return asdict(self) | {"kept": self.kept}

    def lines(self) -> list[str]:
        """For a person."""
        on = self.topology
        where = f"{on['devices']} x {on['device']} in {on['processes']} process{'es' * (on['processes'] > 1)}"
        head = f"{self.name}: {self.steps} steps on {where}, jax {self.versions['jax']}; state {self.checksum}"
        rows = [f"  {'kept  ' if one.kept else 'BROKEN'}  {one.what:<34}{one.shown}" for one in self.findings]
        return [head, *rows]


@dataclass(frozen=True)
class Trial:
    """The run to be verified, and how it is started."""

    recipe: str
    overrides: Sequence[str]
    where: Sequence[str]
    """--devices and --processes."""
    folder: Path
    """Where the runs go."""
    say: Callable[[str], None]

    def place(self, name: str) -> Folder:
        """A run's folder."""
        return Folder(self.folder / name)

    def start(self, name: str, changes: Sequence[str]) -> subprocess.Popen[bytes]:
        """The command in a process of its own."""
        command = [sys.executable, "-m", "dtrain", "run", self.recipe, *self.overrides, "track.notify=null"]
        reported = [*command, *changes, f"name={name}", "--runs-dir", str(self.folder)]
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.output(name).open("w") as output:  # a pipe that nobody reads would fill
            return subprocess.Popen(reported, stdout=subprocess.DEVNULL, stderr=output)

    def output(self, name: str) -> Path:
        """What the newest start of a run said."""
        return self.folder / f"{name}.said"

    def whole(self, name: str, changes: Sequence[str] | None = None) -> None:
        """Run it to its end. DtrainError with what it said where it fails."""
        with _killed_at_last(self.start(name, self.where if changes is None else changes)) as running:
            running.wait()
        if running.returncode:
            output = self.output(name).read_text(errors="replace")[-2000:]
            raise DtrainError(f"the run {name} ended with {running.returncode}:\n{output}")

    def killed(self, name: str, at: Sequence[int]) -> int:
        """Run it to its end, killed (-9) as it gets past each of these steps; how often it really was."""
        struck = 0
        for step in at:
            before, end = heartbeat.read(self.place(name).heartbeat(0)), time.monotonic() + PATIENCE
            with _killed_at_last(self.start(name, [*self.where, "--restarts", "0"])) as running:
                while running.poll() is None and time.monotonic() < end:
                    latest = heartbeat.read(self.place(name).heartbeat(0))
                    if latest and latest != before and latest.step >= step:
                        break
                    time.sleep(0.001)
            struck += running.returncode == -signal.SIGKILL
        self.whole(name)
        return struck


@contextmanager
def _killed_at_last(running: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Nothing of it is left after this, also where this process is interrupted."""
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def verify(trial: Trial, kills: int, seed: int, others: Mapping[str, Sequence[str]]) -> Certificate:
    """Try the promises: `others` are changes to the command under which losses must agree, by what they are called."""
    trial.say("an undisturbed run")
    trial.whole("straight")
    reported = trial.place("straight").read_record()
    steps = reported["steps"]
    certificate = Certificate(
        Path(trial.recipe).stem, steps, reported["topology"], reported["versions"], _checksum(trial, "straight")
    )

    at = sorted(random.Random(seed).sample(range(1, steps), min(kills, steps - 1)))
    trial.say(f"killed at steps {', '.join(map(str, at))}")
    struck = trial.killed("killed", at)
    found = same_bits(trial, struck)
    few = Promise(f"killed {len(at)} times", False, f"only {struck} kills struck while it ran")
    certificate.findings.extend([found] if struck == len(at) else [found, few])
    for number, (what, changes) in enumerate(others.items()):
        trial.say(what)
        trial.whole(f"other-{number}", changes)
        certificate.findings.append(_same_losses(trial, what, f"other-{number}"))
    return certificate


def same_bits(trial: Trial, times: int) -> Promise:
    """Whether the runs "straight" and "killed" ended alike."""
    one, two = (_checksum(trial, name) for name in ("straight", "killed"))
    rows = [_numbers(trial, name) for name in ("straight", "killed")]
    what = f"killed {times} times, resumed"
    if one != two:
        return Promise(what, False, f"the state differs: {two}")
    if rows[0] != rows[1]:
        return Promise(what, False, "the state is the same, the metrics are not")
    return Promise(what, True, f"the same bits; {len(rows[0])} lines of metrics equal")


def _same_losses(trial: Trial, what: str, name: str) -> Promise:
    straight, other = (
        {row["step"]: row["train/loss"] for row in read(trial.place(one).metrics) if "train/loss" in row}
        for one in ("straight", name)
    )
    if straight.keys() != other.keys():
        return Promise(what, False, "other steps were logged")
    worst = max((abs(other[step] - loss) / max(abs(loss), 1e-12) for step, loss in straight.items()), default=0.0)
    same = _checksum(trial, "straight") == _checksum(trial, name)
    return Promise(what, worst <= TOLERANCE, "the same bits" if same else f"losses within {worst:.1e}")


def _checksum(trial: Trial, name: str) -> str:
    place = trial.place(name)
    folder = place.checkpoints / str(place.read_record()["steps"])
    return "-".join(f"{word:08x}" for word in manifest.check(folder, 0, 1).checksum)


def _numbers(trial: Trial, name: str) -> list[str]:
    """The metrics without what depends on the clock."""
    rows = read(trial.place(name).metrics)
    timed = ("time/", "rate/", "plan/")
    return [json.dumps({k: v for k, v in row.items() if not k.startswith(timed)}, sort_keys=True) for row in rows]
