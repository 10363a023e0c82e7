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
