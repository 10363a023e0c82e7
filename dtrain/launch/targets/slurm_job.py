"""The state of a SLURM job, as scontrol prints it."""

import re
from dataclasses import dataclass

from dtrain.core.errors import DtrainError, EnvironmentFault
from dtrain.launch.commands import run

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
"""Of a job that ended badly and left no code of its own."""


@dataclass(frozen=True)
class JobState:
    """One job, in SLURM's words; `code` is None while it has not ended, `seconds` where its run time is not known."""

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
    """None where SLURM has forgotten the job, as it does minutes after the end. EnvironmentFault without an answer."""
    try:
        printed = run(["scontrol", "show", "job", "--oneliner", number])
    except EnvironmentFault as error:
        if "Invalid job id" in error.message:
            return None
        raise
    found = {word.partition("=")[0]: word.partition("=")[2] for word in printed.split()}
    state, nodes = found.get("JobState", ""), found.get("NodeList", "").replace("(null)", "")
    code, _, signal = found.get("ExitCode", "0:0").partition(":")
    ended = int(code) or (128 + int(signal) if int(signal) else 0) or (0 if state == "COMPLETED" else LOST)
    restarts = int(found.get("Restarts") or 0)
    seconds = None if restarts else seconds_of(found.get("RunTime", ""))  # SLURM shows that of one start alone
    return JobState(state, nodes, ended if state in OVER else None, restarts, seconds)


def seconds_of(time: str) -> int | None:
    """SLURM's minutes, minutes:seconds, hours:minutes:seconds, with days- before hours; None for anything else."""
    found = TIME.fullmatch(time)
    if not found:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    scales = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(number * scale for number, scale in zip(numbers, scales, strict=False))
