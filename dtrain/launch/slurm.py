"""A SLURM cluster whose nodes see this machine's folders: one task a node, requeued until it is done."""

import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dtrain.errors import EnvironmentFault, Locked, Stopped
from dtrain.fields import Natural, Positive
from dtrain.folder import Folder, overwrite
from dtrain.launch.job import Common, Job, Plan, Row, Say
from dtrain.launch.names import RemotePath, Word
from dtrain.launch.templates import filled
from dtrain.launch.tool import run

OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
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

    def plan(self, job: Job) -> Plan:
        folder = self._folder(job)
        submit = ["sbatch", "--parsable", str(folder / "job.sbatch")]
        return Plan({"recipe.yaml": job.recipe, "job.sbatch": self._script(job)}, [submit], self.nodes)

    def up(self, job: Job, say: Say) -> dict[str, str]:
        folder, plan = self._folder(job), self.plan(job)
        if job.handle and self._state(job)[0] not in OVER:
            raise Locked(f"{job.name} is in the queue as job {job.handle['id']}", f"dtrain launch status {job.name}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in plan.files.items():
                overwrite(folder / name, text)
            (folder / "stop").unlink(missing_ok=True)
            (folder / "log.txt").unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"cannot write to {folder}: {error.strerror}") from error
        number = run(plan.commands[0]).strip().partition(";")[0]
        say(f"job {number}")
        return {"id": number}

    def status(self, job: Job) -> list[Row]:
        state, nodes, code, restarts = self._state(job)
        record = Folder(self._folder(job).parent).read_record()
        step = f"step {record['step']}/{record.get('steps', '?')} saved" if record else "not begun"
        again = f", requeued {restarts} times" if restarts not in ("", "0") else ""
        ended = int(code) if state in OVER and code.isdecimal() else None
        word = "stopped" if ended == Stopped.exit_code else state.lower()
        return [Row(f"job {job.handle['id']}", word, f"{nodes or 'no node yet'}, {step}{again}", ended)]

    def logs(self, job: Job, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        log, offset, mine = self._folder(job) / "log.txt", 0, None if host is None else str(host)
        while True:
            over = not follow or self._state(job)[0] in OVER
            with suppress(FileNotFoundError), log.open("rb") as file:
                file.seek(offset)
                for line in file:
                    offset += len(line)
                    task, found, text = line.decode(errors="replace").rstrip("\n").partition(": ")
                    rank = task.strip() if found and task.strip().isdecimal() else ""
                    if mine in (None, rank):
                        yield (rank or "job"), (text if rank else f"{task}{found}{text}")
            if over:
                return
            time.sleep(POLL)

    def stop(self, job: Job, say: Say) -> None:
        (self._folder(job) / "stop").touch()
        state = self._state(job)[0]
        if state in OVER:
            return
        if state == "PENDING":
            run(["scancel", job.handle["id"]])
        else:
            run(["scancel", "--batch", "--signal=TERM", job.handle["id"]])
        end = time.monotonic() + STOPPED
        while self._state(job)[0] not in OVER:
            if time.monotonic() > end:
                raise EnvironmentFault(f"job {job.handle['id']} did not stop in {STOPPED:.0f} s")
            time.sleep(POLL)
        say(f"job {job.handle['id']}: {self.status(job)[0].what}")

    def down(self, job: Job, say: Say) -> None:
        if self._state(job)[0] not in OVER:
            run(["scancel", job.handle["id"]])
            say(f"job {job.handle['id']} is cancelled")

    def removes(self, job: Job) -> list[str]:
        return [f"job {job.handle['id']} from the queue"]

    def _folder(self, job: Job) -> Path:
        return Path(self.runs).expanduser().absolute() / job.name / "launch"

    def _state(self, job: Job) -> tuple[str, str, str, str]:
        """State, nodes, exit code, restarts; of a job that SLURM has forgotten, as its run's folder tells."""
        try:
            said = run(["scontrol", "show", "job", "--oneliner", job.handle["id"]])
        except EnvironmentFault as error:
            if "Invalid job id" not in error.message:
                raise
            return "COMPLETED", "", "", ""
        found = {word.partition("=")[0]: word.partition("=")[2] for word in said.split()}
        code = found.get("ExitCode", "").partition(":")[0]
        nodes = found.get("NodeList", "").replace("(null)", "")
        return found.get("JobState", ""), nodes, code, found.get("Restarts", "")

    def _script(self, job: Job) -> str:
        folder = self._folder(job)
        given = {"time": self.time, "partition": self.partition, "account": self.account, "qos": self.qos}
        given |= {"constraint": self.constraint, "cpus-per-task": self.cpus, "mem": self.memory}
        given |= {"gpus-per-node": self.gpus or None}
        command = [self.python, "-m", "dtrain", "run", str(folder / "recipe.yaml")]
        command += ["--runs-dir", str(folder.parents[1]), *self.run_options(job)]
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
