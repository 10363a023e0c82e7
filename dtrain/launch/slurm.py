"""A SLURM cluster whose nodes see this machine's folders: one task a node, requeued until it is done."""

import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dtrain.errors import DtrainError, EnvironmentFault, FieldError, Locked, RecipeError, Stopped
from dtrain.fields import Natural, Positive
from dtrain.folder import Folder, overwrite
from dtrain.launch.job import Common, Job, Plan, Row, Say
from dtrain.launch.names import RemotePath, Word
from dtrain.launch.templates import filled
from dtrain.launch.tool import run

OVER = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
}
PATH = re.compile(r"/[A-Za-z0-9_./-]+")
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
LOST = DtrainError.exit_code
"""Of a job that ended badly and left no code of its own."""
POLL = 1.0
STOPPED = 300.0
"""Seconds in which a job that was asked to stop has saved and left the queue."""
PASSED_ON = ("PATH", "HOME", "USER", "LANG")


@dataclass(frozen=True, kw_only=True)
class Slurm(Common):
    """One batch job. Its script, log and recipe lie in the run's folder, under launch/."""

    kind: Literal["slurm"] = "slurm"
    nodes: Positive = 1
    runs: RemotePath = "runs"
    """The folder of run folders, the same here and on the nodes."""
    python: RemotePath = "python3"
    """The Python on the nodes that dtrain is installed for."""
    time: Word | None = None
    """The longest that a start may take, as 24:00:00; the run is asked to save before, and requeued."""
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    gpus: Natural = 0
    """Of each node."""
    cpus: Positive | None = None
    """Of each node."""
    memory: Word | None = None
    """Of each node, as 100G."""
    grace: Positive = 120
    """Seconds before the end of its time in which it is asked to save."""

    def __post_init__(self) -> None:
        seconds = _seconds(self.time) if self.time else None
        if self.time and seconds is None:
            raise FieldError(
                "time", f"{self.time!r} is no time", "minutes, hours:minutes:seconds or days-hours:minutes:seconds"
            )
        if seconds is not None and seconds <= self.grace:
            message = f"time = {self.time} leaves nothing beside grace = {self.grace} seconds"
            raise FieldError("time", message, "more time, or less grace")

    def plan(self, job: Job) -> Plan:
        folder = self._folder(job)
        submit = ["sbatch", "--parsable", str(folder / "job.sbatch")]
        return Plan({"recipe.yaml": job.recipe, "job.sbatch": self._script(job)}, [submit], self.nodes)

    def up(self, job: Job, say: Say) -> dict[str, str]:
        missing = [name for name in self.environment if name not in os.environ]
        if missing:
            raise EnvironmentFault(f"{missing[0]} is not set here")
        folder, plan = self._folder(job), self.plan(job)
        if job.handle and self._state(job)[0] not in OVER:
            raise Locked(f"{job.name} is in the queue as job {job.handle['id']}", f"dtrain launch status {job.name}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in plan.files.items():
                overwrite(folder / name, text)
            for name in ("stop", "stuck", "log.txt"):
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"cannot write to {folder}: {error.strerror}") from error
        number = run(plan.commands[0]).strip().partition(";")[0]
        say(f"job {number}")
        return {"id": number}

    def status(self, job: Job) -> list[Row]:
        state, nodes, code, restarts = self._state(job)
        record = self._record(job)
        step = f"step {record['step']}/{record.get('steps', '?')} saved" if record else "not begun"
        again = f", requeued {restarts} times" if restarts not in ("", "0") else ""
        ended = code if state in OVER else None
        word = "stopped" if ended == Stopped.exit_code else state.lower()
        return [Row(f"job {job.handle['id']}", word, f"{nodes or 'no node yet'}, {step}{again}", ended)]

    def logs(self, job: Job, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        log, offset, mine = self._folder(job) / "log.txt", 0, None if host is None else str(host)
        while True:
            over = not follow or self._is_over(job)
            with suppress(FileNotFoundError), log.open("rb") as file:
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n") and not over:
                        break
                    offset += len(line)
                    task, found, text = line.decode(errors="replace").rstrip("\n").partition(": ")
                    rank = task.strip() if found and task.strip().isdecimal() else ""
                    if mine in (None, rank):
                        yield (rank or "job"), (text if rank else f"{task}{found}{text}")
            if over:
                return
            time.sleep(POLL)

    def stop(self, job: Job, say: Say) -> None:
        mark, number, asked = self._folder(job) / "stop", job.handle["id"], False
        mark.touch()
        end = time.monotonic() + STOPPED
        while (state := self._state(job)[0]) not in OVER:
            if state == "PENDING":  # again, where SLURM itself requeued it meanwhile
                run(["scancel", "--state=PENDING", number])
            elif state == "RUNNING" and not asked:
                run(["scancel", "--batch", "--signal=TERM", number])
                asked = True
            if time.monotonic() > end:
                raise EnvironmentFault(f"job {number} is still saving after {STOPPED:.0f} s", "ask for its status")
            time.sleep(POLL)
        say(f"job {job.handle['id']}: {self.status(job)[0].what}")

    def down(self, job: Job, say: Say) -> None:
        if self._state(job)[0] not in OVER:
            (self._folder(job) / "stop").touch()  # so that it does not requeue itself on its way out
            run(["scancel", job.handle["id"]])
            say(f"job {job.handle['id']} is cancelled")

    def removes(self, job: Job) -> list[str]:
        return [f"job {job.handle['id']} from the queue"]

    def _folder(self, job: Job) -> Path:
        found = Path(self.runs).expanduser().absolute() / job.name / "launch"
        if not PATH.fullmatch(str(found)):
            message = f"{found}: SLURM's scripts take letters, digits and _ . / - in a path"
            raise RecipeError(message, "set launch.runs to such a folder")
        return found

    def _record(self, job: Job) -> dict[str, Any]:
        return Folder(self._folder(job).parent).read_record()

    def _is_over(self, job: Job) -> bool:
        try:
            return self._state(job)[0] in OVER
        except EnvironmentFault:
            return False  # its controller may be starting again

    def _state(self, job: Job) -> tuple[str, str, int, str]:
        """State, nodes, exit code, restarts; of a job that SLURM has forgotten, as its run's folder tells."""
        try:
            said = run(["scontrol", "show", "job", "--oneliner", job.handle["id"]])
        except EnvironmentFault as error:
            if "Invalid job id" not in error.message:
                raise
            code = self._record(job).get("exit_code")
            return ("COMPLETED" if code == 0 else "FAILED"), "", LOST if code is None else code, ""
        found = {word.partition("=")[0]: word.partition("=")[2] for word in said.split()}
        code, _, number = found.get("ExitCode", "0:0").partition(":")
        state, nodes = found.get("JobState", ""), found.get("NodeList", "").replace("(null)", "")
        ended = int(code) or (128 + int(number) if int(number) else 0)
        return state, nodes, ended or (0 if state == "COMPLETED" else LOST), found.get("Restarts", "")

    def _script(self, job: Job) -> str:
        folder = self._folder(job)
        given = {"time": self.time, "partition": self.partition, "account": self.account, "qos": self.qos}
        given |= {"constraint": self.constraint, "cpus-per-task": self.cpus, "mem": self.memory}
        given |= {"gpus-per-node": self.gpus or None}
        command = [
            str(Path(self.python).expanduser()) if self.python.startswith("~") else self.python,
            "-m",
            "dtrain",
            "run",
            str(folder / "recipe.yaml"),
        ]
        command += ["--runs-dir", str(folder.parents[1]), *self.run_options()]
        return filled(
            "slurm.sbatch",
            {
                "NAME": job.name,
                "NODES": str(self.nodes),
                "FOLDER": str(folder),
                "GRACE": str(self.grace),
                "EXPORT": ",".join((*PASSED_ON, *self.environment)),
                "DIRECTIVES": "\n".join(f"#SBATCH --{name}={value}" for name, value in given.items() if value),
                "COMMAND": shlex.join(command),
            },
        )


def _seconds(time: str) -> int | None:
    """SLURM's minutes, minutes:seconds, hours:minutes:seconds, with days- before hours; None for anything else."""
    found = TIME.fullmatch(time)
    if not found:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    scales = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(number * scale for number, scale in zip(numbers, scales, strict=False))
