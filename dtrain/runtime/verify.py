"""Verify the guarantees of a run: killed at random steps and resumed, it ends with the same bits; other engines and
other numbers of processes and devices give the same losses except for rounding."""

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

from dtrain.checkpoint import manifest
from dtrain.core import heartbeat
from dtrain.core.errors import DtrainError
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject
from dtrain.track.jsonl import read

TOLERANCE = 1e-3
"""Largest allowed relative difference of losses, at any step, with another engine or topology."""

PATIENCE = 600.0
"""Seconds to wait until a run reaches the step at which it is killed."""


@dataclass(frozen=True)
class Guarantee:
    """One guarantee, and whether it was kept."""

    what: str
    kept: bool
    shown: str


@dataclass(frozen=True)
class Certificate:
    """What was verified, and the results."""

    name: str
    steps: int
    topology: JsonObject
    versions: Mapping[str, str]
    checksum: str
    """Checksum of the bits of the last state."""
    findings: list[Guarantee] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether every guarantee was kept."""
        return all(finding.kept for finding in self.findings)

    def values(self) -> JsonObject:
        """The certificate as JSON values."""
        return asdict(self) | {"kept": self.kept}

    def lines(self) -> list[str]:
        """The certificate as lines of text."""
        topology, processes = self.topology, self.topology["processes"]
        where = f"{topology['devices']} x {topology['device']} in {processes} process{'es' * (processes > 1)}"
        head = f"{self.name}: {self.steps} steps on {where}, jax {self.versions['jax']}; state {self.checksum}"
        rows = [f"  {'kept  ' if item.kept else 'BROKEN'}  {item.what:<34}{item.shown}" for item in self.findings]
        return [head, *rows]


@dataclass(frozen=True)
class Trial:
    """The run to verify, and how to start it."""

    recipe: str
    overrides: Sequence[str]
    where: Sequence[str]
    """The options --devices and --processes."""
    folder: Path
    """Folder for the run folders."""
    say: Callable[[str], None]

    def run_dir(self, name: str) -> Folder:
        """The folder of the run with this name."""
        return Folder(self.folder / name)

    def start(self, name: str, changes: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start the run as a separate process."""
        command = [sys.executable, "-m", "dtrain", "run", self.recipe, *self.overrides, "track.notify=null"]
        command += [*changes, f"name={name}", "--runs-dir", str(self.folder)]
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.output(name).open("w") as output:  # not a pipe, which would block when full
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output)

    def output(self, name: str) -> Path:
        """The file with the output of the newest start of a run."""
        return self.folder / f"{name}.log"

    def run_to_end(self, name: str, changes: Sequence[str] | None = None) -> None:
        """Run to the end. Raises DtrainError with the output if the run fails."""
        with _killed_at_last(self.start(name, self.where if changes is None else changes)) as running:
            running.wait()
        if running.returncode:
            output = self.output(name).read_text(errors="replace")[-2000:]
            raise DtrainError(f"the run {name} ended with exit code {running.returncode}:\n{output}")

    def killed(self, name: str, at: Sequence[int]) -> int:
        """Run to the end, killed (-9) after each of these steps. Returns how many kills hit the run before its end."""
        kills = 0
        for step in at:
            before, end = heartbeat.read(self.run_dir(name).heartbeat(0)), time.monotonic() + PATIENCE
            with _killed_at_last(self.start(name, [*self.where, "--restarts", "0"])) as running:
                while running.poll() is None and time.monotonic() < end:
                    latest = heartbeat.read(self.run_dir(name).heartbeat(0))
                    if latest and latest != before and latest.step >= step:
                        break
                    time.sleep(0.001)
            kills += running.returncode == -signal.SIGKILL
        self.run_to_end(name)
        return kills


@contextmanager
def _killed_at_last(running: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kill the process on exit, also if this process is interrupted."""
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def verify(trial: Trial, kills: int, seed: int, others: Mapping[str, Sequence[str]]) -> Certificate:
    """Check all guarantees. `others`: name → options of other engines or topologies whose losses must agree."""
    trial.say("an undisturbed run")
    trial.run_to_end("straight")
    record = trial.run_dir("straight").read_record()
    steps = record["steps"]
    certificate = Certificate(
        Path(trial.recipe).stem, steps, record["topology"], record["versions"], checksum(trial.run_dir("straight"))
    )

    at = sorted(random.Random(seed).sample(range(1, steps), min(kills, steps - 1)))
    trial.say(f"killed at steps {', '.join(map(str, at))}")
    hits = trial.killed("killed", at)
    for name in ("straight", "killed"):
        manifest.check(trial.run_dir(name).checkpoints / str(steps), 0, 1)
    result = same_bits(trial.run_dir("straight"), trial.run_dir("killed"), hits)
    few = Guarantee(f"killed {len(at)} times", False, f"only {hits} kills came before the run ended")
    certificate.findings.extend([result] if hits == len(at) else [result, few])
    for number, (what, changes) in enumerate(others.items()):
        trial.say(what)
        trial.run_to_end(f"other-{number}", changes)
        certificate.findings.append(_same_losses(trial, what, f"other-{number}"))
    return certificate


def same_bits(straight: Folder, killed: Folder, times: int) -> Guarantee:
    """Whether a run that was killed so many times has the same final state and metrics as an undisturbed one."""
    states = [checksum(run) for run in (straight, killed)]
    rows = [_numbers(run) for run in (straight, killed)]
    what = f"killed {times} times, resumed"
    if states[0] != states[1]:
        return Guarantee(what, False, f"the state differs: {states[1]}")
    if rows[0] != rows[1]:
        return Guarantee(what, False, "the state is the same, but the metrics differ")
    return Guarantee(what, True, f"the same bits; {len(rows[0])} lines of metrics equal")


def _same_losses(trial: Trial, what: str, name: str) -> Guarantee:
    straight, other = (
        {row["step"]: row["train/loss"] for row in read(trial.run_dir(run).metrics) if "train/loss" in row}
        for run in ("straight", name)
    )
    if straight.keys() != other.keys():
        return Guarantee(what, False, "different steps were logged")
    worst = max((abs(other[step] - loss) / max(abs(loss), 1e-12) for step, loss in straight.items()), default=0.0)
    same = checksum(trial.run_dir("straight")) == checksum(trial.run_dir(name))
    return Guarantee(what, worst <= TOLERANCE, "the same bits" if same else f"losses within {worst:.1e}")


def checksum(run: Folder) -> str:
    """Checksum of the bits of the last state of a run, from the manifest of its last step."""
    last = run.checkpoints / str(run.read_record()["steps"])
    return "-".join(f"{word:08x}" for word in manifest.read(last).checksum)


def _numbers(run: Folder) -> list[str]:
    """The lines of metrics without values that depend on the clock."""
    rows = read(run.metrics)
    timed = ("time/", "rate/", "plan/")
    return [json.dumps({k: v for k, v in row.items() if not k.startswith(timed)}, sort_keys=True) for row in rows]
