"""Client of the program `sky`: managed jobs by name and number, with their states in the queue."""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dtrain.core.errors import Aborted, DtrainError, EnvironmentFault
from dtrain.core.types import JsonObject
from dtrain.launch.commands import WAIT, run

PROVED = re.compile(r"version 0\.14\.[1-9]")
"""Versions of `sky` that dtrain was tested with."""
WAITING = {"PENDING", "SUBMITTED", "STARTING", "RECOVERING"}
"""States without a live run on the machines."""
UNDER_CANCEL = "CANCELLING"
"""State of a job that is being cancelled, neither waiting nor over."""
OVER = {"SUCCEEDED": 0, "CANCELLED": Aborted.exit_code, "FAILED": DtrainError.exit_code}
OVER |= {f"FAILED_{what}": 3 for what in ("SETUP", "PRECHECKS", "NO_RESOURCE", "CONTROLLER")}
"""Final states, with the exit code to use if the run reported none."""
LINE = re.compile(r"\(([^,()]+)(?:, rank=(\d+))?, pid=\d+[^)]*\) ?(.*)")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NOT_FINISHED = 101
"""Exit code of `sky jobs logs --follow` when the run exits with a code that restarts it; sky does not wait for that."""
KILLED = (0, 137)
"""Exit codes of hosts that SkyPilot ended after another host had failed."""


@dataclass(frozen=True)
class ManagedJob:
    """A job as the queue shows it."""

    row: JsonObject

    @property
    def id(self) -> str:
        return str(self.row["job_id"])

    @property
    def state(self) -> str:
        """The state in SkyPilot's terms."""
        return self.row["status"]

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def code(self) -> int | None:
        """Exit code; of several hosts, that of the first that failed by itself. None while it has not ended."""
        part = re.search(r"exit codes? \[?([\d, ]+)", self.row.get("failure_reason") or "")
        codes = [int(number) for number in re.findall(r"\d+", part[1])] if part and self.state == "FAILED" else []
        return next((code for code in codes if code not in KILLED), OVER.get(self.state))

    @property
    def user(self) -> str:
        """The user who submitted it; empty if the queue does not show it."""
        return self.row.get("user_name") or self.row.get("user_hash") or ""

    def __str__(self) -> str:
        return f"job {self.id}{f' of {self.user}' if self.user else ''}"

    def details(self) -> str:
        """State, location, number of restarts and failure reason, in one line."""
        restarts = self.row.get("recovery_count")
        parts = [self.state.lower(), self.row.get("infra"), f"restarts: {restarts}" if restarts else ""]
        parts.append(self.row.get("failure_reason") or self.row.get("details"))
        return ", ".join(" ".join(part.split()) for part in parts if part and part != "-")


@dataclass(frozen=True)
class Client:
    """`sky` on this machine, without telemetry."""

    server: str | None = None
    """Address of the API server; None for the one chosen by `sky api login`."""

    def sky(self, *words: str, wait: float = WAIT) -> str:
        """Run `sky` and return its output without colours. EnvironmentFault as in `run`."""
        return COLOUR.sub("", run(["sky", *words], wait=wait, environment=self._environment()))

    def jobs(self, name: str, own: bool = False) -> list[ManagedJob]:
        """The jobs of that name, newest first: of all users, or with `own` of this user as the server identifies it."""
        try:
            printed = self.sky("jobs", "queue", "-v", "-a", *([] if own else ["-u"]), "-o", "json")
        except EnvironmentFault as error:
            if "No in-progress managed jobs" not in error.message:
                raise
            return []
        found = re.search(r"^\[\]?$.*", printed, re.MULTILINE | re.DOTALL)  # a starting server prints lines before it
        if not found:
            raise EnvironmentFault("sky jobs queue printed no JSON")
        rows = [row for row in json.JSONDecoder().raw_decode(found[0])[0] if row["job_name"] == name]
        return [ManagedJob(row) for row in sorted(rows, key=lambda row: -row["job_id"])]

    def find(self, name: str, handle: Mapping[str, str], own: bool = False) -> ManagedJob | None:
        """The job with the handle's number; without one, the newest of that name whose number exceeds `after`."""
        number, after = handle.get("id"), int(handle.get("after", 0))
        found = self.jobs(name, own)
        return next((one for one in found if (one.id == number if number else int(one.id) > after)), None)

    def own(self, name: str, handle: Mapping[str, str]) -> ManagedJob:
        """The job that may be ended from here. EnvironmentFault if it is not listed, or if `up` did not record its
        number and it belongs to another user."""
        known = "id" in handle and "user" not in handle
        if found := self.find(name, handle, own=not known):
            return found
        if not known and (other := self.find(name, handle)):
            what = f"{other} has that name, and this user did not submit it"
            raise EnvironmentFault(what, f"if you mean this job, `sky jobs cancel {other.id}` ends it without saving")
        job = f"job {handle['id']}" if known else f"job {name}"
        raise EnvironmentFault(
            f"{self.server or 'the server that `sky api info` shows'} does not list {job}, so nothing was ended",
            "it may be on another server (launch.server), behind a controller that is stopped (`sky jobs queue -r`),"
            f" or still a request (`sky api status`, `sky api cancel`); if it ended, remove runs/{name}/launch.json",
        )

    def lines(self, number: str, follow: bool) -> Iterator[tuple[str, int | None, str]]:
        """Yield (machine, rank, line) of a job's log, also after restarts; SkyPilot's own lines have no rank."""
        words = ["sky", "jobs", "logs", number, "--tail", "0", "--follow" if follow else "--no-follow"]
        pipe, both, code = subprocess.PIPE, subprocess.STDOUT, NOT_FINISHED
        while code == NOT_FINISHED:
            with subprocess.Popen(words, stdout=pipe, stderr=both, errors="replace", env=self._environment()) as sky:
                for text in (COLOUR.sub("", line.rstrip("\n")) for line in sky.stdout or ()):
                    part = LINE.fullmatch(text)
                    yield (part[1], int(part[2] or 0), part[3]) if part else ("sky", None, text)
            code = sky.returncode
        if code == 1:  # other codes report how the job ended
            raise EnvironmentFault("sky jobs logs failed", "see the last lines of its output")

    def _environment(self) -> dict[str, str]:
        server = {"SKYPILOT_API_SERVER_ENDPOINT": self.server} if self.server else {}
        return {**os.environ, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", **server}
