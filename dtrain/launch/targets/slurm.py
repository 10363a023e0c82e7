"""A SLURM cluster whose nodes share this machine's folders: one task on each node, requeued until the run ends."""

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from dtrain.core import heartbeat
from dtrain.core.errors import DtrainError, EnvironmentFault, LeftBehind, Locked, RecipeError, Stopped
from dtrain.core.files import overwrite
from dtrain.core.process_info import COORDINATOR, exports
from dtrain.core.run_dir import Folder, newest_step
from dtrain.core.types import Natural, Positive
from dtrain.launch import registry
from dtrain.launch.commands import follow_log, run, text_of
from dtrain.launch.job import Check, LaunchJob, LaunchPlan, LaunchTarget, MachineState, Say, fill_template
from dtrain.launch.names import RemotePath, Word, refuse

OVER = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
LOST = DtrainError.exit_code
"""Exit code of a job that failed without a code of its own."""


@dataclass(frozen=True)
class JobState:
    """One job, in SLURM's terms; `code` is None while it has not ended, `seconds` if its run time is not known."""

    state: str
    nodes: str = ""
    code: int | None = None
    restarts: int = 0
    seconds: float | None = None

    @property
    def over(self) -> bool:
        """Whether it has left the queue."""
        return self.state in OVER


def job_state(number: str) -> JobState | None:
    """State of a job; None if SLURM no longer lists it, minutes after its end. EnvironmentFault if scontrol fails."""
    try:
        printed = run(["scontrol", "show", "job", "--oneliner", number])
    except EnvironmentFault as error:
        if "Invalid job id" in error.message:
            return None
        raise
    fields = {word.partition("=")[0]: word.partition("=")[2] for word in printed.split()}
    state, nodes = fields.get("JobState", ""), fields.get("NodeList", "").replace("(null)", "")
    code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    ended = int(code) or (128 + int(signal) if int(signal) else 0) or (0 if state == "COMPLETED" else LOST)
    restarts = int(fields.get("Restarts") or 0)
    seconds = None if restarts else seconds_of(fields.get("RunTime", ""))  # RunTime is that of the last start only
    return JobState(state, nodes, ended if state in OVER else None, restarts, seconds)


def seconds_of(time: str) -> int | None:
    """Seconds of a SLURM time: minutes, minutes:seconds, hours:minutes:seconds, days-hours...; None for other text."""
    match = TIME.fullmatch(time)
    if not match:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    scales = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(number * scale for number, scale in zip(numbers, scales, strict=False))


PATH = re.compile(r"/[A-Za-z0-9_./-]+")
POLL = 1.0
STOPPED = 300.0
"""Seconds to wait for a job to save and leave the queue after a stop request."""
PROCESS = exports("$SLURM_PROCID", "$SLURM_NTASKS", f"${COORDINATOR}")
"""Commands that set the environment of a task; the batch script sets the coordinator."""
PASSED_ON = ("PATH", "HOME", "USER", "LANG")
UNPLACED = "node configuration is not available"
"""Printed by `sbatch --test-only` if no node could ever run the job, and also if the nodes are drained for now."""


@dataclass(frozen=True, kw_only=True)
class Slurm(LaunchTarget):
    """One batch job. Its script, log and recipe are in the run's folder, under launch/."""

    files: ClassVar[Literal["shared", "own", "unknown"]] = "unknown"

    kind: Literal["slurm"] = "slurm"
    nodes: Positive = 1
    """Nodes of one run."""
    runs: RemotePath = "runs"
    """The folder of run folders, the same here and on the nodes."""
    python: RemotePath = "python3"
    """The Python on the nodes that dtrain is installed for."""
    time: Word | None = None
    """SLURM's limit of one start, as 24:00:00: the run saves before it and is requeued. `hours` limits all starts."""
    partition: Word | None = None
    """SLURM's partition; default: the cluster's own."""
    account: Word | None = None
    """SLURM's account that is charged."""
    qos: Word | None = None
    """SLURM's quality of service."""
    constraint: Word | None = None
    """Features that the nodes must have, as for sbatch --constraint."""
    gpus: Natural = 0
    """GPUs of each node."""
    cpus: Positive | None = None
    """CPUs of each node."""
    memory: Word | None = None
    """Memory of each node, as 100G."""
    grace: Positive = 120
    """Seconds before its time limit at which the run is asked to save."""
    replaces_hosts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        seconds = seconds_of(self.time) if self.time else None
        short = f"time = {self.time} is not longer than grace = {self.grace} seconds"
        allowed = "minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        refuse(
            (self.time and seconds is None, "time", f"{self.time!r} is not a time", allowed),
            (seconds is not None and seconds <= self.grace, "time", short, "increase time, or reduce grace"),
        )

    def plan(self, job: LaunchJob) -> LaunchPlan:
        files = {"recipe.yaml": job.recipe, "job.sbatch": self._script(job)}
        submit = ["sbatch", "--parsable", str(self._submitted(job) / "job.sbatch")]
        bound = f"time = {self.time} limits each start, which is then requeued; launch.hours limits all starts together"
        notes = (bound,) if self.time and not self.hours else ()
        return LaunchPlan(files, [submit], self.nodes, hours=self.limit(), notes=notes)

    def describe(self) -> list[str]:
        options = "".join(f", {name} {value}" for name, value in self._directives().items())
        return [
            f"hosts: {self.nodes} nodes of the cluster that sbatch reaches{options}",
            f"program: {self.python} -m dtrain run",
            f"run folders: {Path(self.runs).expanduser().absolute()}, the same on this machine and on the nodes",
        ]

    def checks(self, job: LaunchJob) -> list[Check]:
        return [*super().checks(job), partial(self._accepted, job)]

    def _accepted(self, job: LaunchJob) -> list[str]:
        """Check that SLURM would accept the script; nothing is submitted."""
        runs = self._run(job).path.parent
        notes = [f"not checked: whether the nodes share {runs}, and whether {self.python} there has dtrain"]
        try:
            run(["sbatch", "--test-only"], given=self._script(job))
        except EnvironmentFault as error:
            if UNPLACED not in error.message:
                raise
            notes.insert(0, f"no node can take the job now: {error.message}")
        return notes

    def find(self, job: LaunchJob) -> dict[str, str] | None:
        found = registry.find(self._run(job).path.parent, job.name)
        return found.handle if found and found.target.get("kind") == self.kind else None

    def start_handle(self, job: LaunchJob) -> dict[str, str]:
        before = replace(job, handle=job.handle or self.find(job) or {})
        if "id" in before.handle and not self._state(before).over:
            raise Locked(f"{job.name} is in the queue as job {_number(before)}", f"dtrain launch status {job.name}")
        return {}  # an interrupted `up` must not leave the number of the earlier job

    def up(self, job: LaunchJob, say: Say) -> dict[str, str]:
        self.start_handle(job)
        folder, plan = self._submitted(job), self.plan(job)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in plan.files.items():
                overwrite(folder / name, text)
            for old in (folder / "log.txt", self._run(job).stop_request):
                old.unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"cannot write to {folder}: {error.strerror}") from error
        number = run(plan.commands[0]).strip().partition(";")[0]
        say(f"job {number}")
        handle = {"id": number, "folder": str(folder)}
        try:  # `find` reads it there, from any machine
            registry.write(self._run(job), replace(job, handle=handle))
        except EnvironmentFault as error:
            raise LeftBehind(f"job {number} is submitted, but {error.message}", f"scancel {number}") from error
        return handle

    def status(self, job: LaunchJob) -> list[MachineState]:
        found, run_dir = self._state(job), self._run(job)
        record = run_dir.read_record()
        begun = "ended before its first step" if found.over and found.code else "not begun"
        step = f"step {newest_step(run_dir, record)}/{record.get('steps', '?')} saved" if record else begun
        again = f", requeued {found.restarts} times" if found.restarts else ""
        saved = found.code == Stopped.exit_code or (found.code == 0 and record.get("state") == "stopped")
        state, what = "stopped" if saved else found.state.lower(), f"{found.nodes or 'no node yet'}, {step}{again}"
        latest = heartbeat.read(run_dir.heartbeat(0))
        return [MachineState(f"job {_number(job)}", state, what, found.code, found.seconds, latest)]

    def fail(self, job: LaunchJob, host: int, *, whole: bool) -> str:
        number = _number(job)
        nodes = run(["scontrol", "show", "hostnames", self._state(job).nodes]).split()
        # of the processes of the job's step 0 on a node: the first that the supervisor started, or all
        chosen = "" if whole else "| sort -n | sed -n 2p"
        listed = f"scontrol listpids {number} {nodes[host]} | awk '$3 == \"0\" {{print $1}}' {chosen}"
        command = ["srun", f"--jobid={number}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={nodes[host]}"]
        run([*command, "bash", "-c", f"{listed} | xargs --no-run-if-empty kill -KILL"])
        return nodes[host]

    def read(self, job: LaunchJob, name: str) -> str:
        return text_of(self._run(job).path / name)

    def logs(self, job: LaunchJob, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        def over() -> bool:
            with suppress(EnvironmentFault):  # its controller may be restarting
                return not follow or self._state(job).over
            return False

        for _, line in follow_log(self._submitted(job) / "log.txt", 0, over, lambda: time.sleep(POLL)):
            task, found, text = line.partition(": ")
            rank = task.strip() if found and task.strip().isdecimal() else ""
            if host is None or rank == str(host):
                yield (rank or "job"), (text if rank else line)

    def stop(self, job: LaunchJob, say: Say) -> None:
        asked, number = False, self._request_stop(job)
        end = time.monotonic() + STOPPED
        while not (found := self._state(job)).over:
            if found.state == "PENDING":  # repeated, as SLURM itself may requeue it
                run(["scancel", "--state=PENDING", number])
            elif found.state == "RUNNING" and not asked:
                run(["scancel", "--batch", "--signal=TERM", number])
                asked = True
            if time.monotonic() > end:
                raise EnvironmentFault(
                    f"job {number} is still saving after {STOPPED:.0f} s", "see `dtrain launch status`"
                )
            time.sleep(POLL)
        say(f"job {number}: {self.status(job)[0].what}")

    def down(self, job: LaunchJob, say: Say) -> None:
        if not self._state(job).over:
            run(["scancel", self._request_stop(job)])  # with the stop request it does not requeue itself
            say(f"job {_number(job)} is cancelled")
        registry.forget(self._run(job).path.parent, job.name)

    def removes(self, job: LaunchJob) -> list[str]:
        return [f"job {_number(job)} from the queue"]

    def _request_stop(self, job: LaunchJob) -> str:
        """Write the stop request: the run saves and exits with 0, and its script does not requeue it. Job number."""
        path = self._run(job).stop_request
        try:
            path.touch()
        except OSError as error:
            raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from error
        return _number(job)

    def _run(self, job: LaunchJob) -> Folder:
        return Folder(self._submitted(job).parent)

    def _submitted(self, job: LaunchJob) -> Path:
        """Folder of the submitted files, in the run's folder."""
        if "folder" in job.handle:  # `runs` may be relative to the folder where `up` was run
            return Path(job.handle["folder"])
        path = Path(self.runs).expanduser().absolute() / job.name / "launch"
        if not PATH.fullmatch(str(path)):
            message = f"{path}: a path in SLURM's scripts may have only letters, digits and _ . / -"
            raise RecipeError(message, "set launch.runs to such a folder")
        return path

    def _state(self, job: LaunchJob) -> JobState:
        """State of the job, from its run folder if SLURM no longer lists it."""
        if found := job_state(_number(job)):
            return found
        code = self._run(job).read_record().get("exit_code")
        return JobState("COMPLETED" if code == 0 else "FAILED", code=LOST if code is None else code)

    def _directives(self) -> dict[str, Any]:
        values = {"time": self.time, "partition": self.partition, "account": self.account, "qos": self.qos}
        values |= {"constraint": self.constraint, "cpus-per-task": self.cpus, "mem": self.memory}
        return {name: value for name, value in (values | {"gpus-per-node": self.gpus}).items() if value}

    def _script(self, job: LaunchJob) -> str:
        folder = self._submitted(job)
        python = str(Path(self.python).expanduser()) if self.python.startswith("~") else self.python
        command = [python, "-m", "dtrain", "run", str(folder / "recipe.yaml"), "--runs-dir", str(folder.parents[1])]
        variables = [f"{name}={value}" for name, value in job.environment().items()]
        words = {"NAME": job.name, "NODES": self.nodes, "FOLDER": folder, "GRACE": self.grace}
        words |= {"EXPORT": ",".join((*PASSED_ON, *self.environment, *variables)), "PROCESS": PROCESS}
        words["DIRECTIVES"] = "\n".join(f"#SBATCH --{name}={value}" for name, value in self._directives().items())
        return fill_template("slurm.sbatch", words | {"COMMAND": shlex.join([*command, *self.run_options(job)])})


def _number(job: LaunchJob) -> str:
    """SLURM's number of the job."""
    if "id" not in job.handle:
        message = f"`up` was interrupted, and whether sbatch accepted {job.name} is not known"
        raise RecipeError(message, f"`squeue --me --name={job.name}` shows it; `scancel` removes it from the queue")
    return job.handle["id"]
