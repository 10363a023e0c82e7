"""How a notification leaves the machine: as JSON to a webhook, or on the standard input of a command.

Delivery reports what went wrong in place of raising, and never quotes the webhook's URL, which is a secret.
"""

import json
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from typing import Any, Protocol
from urllib.error import HTTPError

from dtrain import __version__
from dtrain.core.errors import cause
from dtrain.core.process_info import LAUNCH

LIMIT = 10.0
"""Seconds that a run waits for a notification, whatever the other side does."""
TIMEOUT = 4.0
"""Seconds that one request may take."""
PAUSES = (0.0, 0.5, 1.0)
"""Seconds before each try of a request."""
COMMAND = 8.0
"""Seconds that a command may take, after which it is killed."""
LONGEST = 500
"""Characters of a reason: Slack and Discord refuse long texts."""
PASSED = LAUNCH
"""The one variable of dtrain's own that a command inherits: the others would bind a run that it starts to this one."""


@dataclass(frozen=True, kw_only=True)
class Notification:
    """One event of a run, with the values that a receiver gets."""

    event: str
    run: str
    state: str
    step: int
    """The newest step that is saved."""
    steps: int | None = None
    reason: str = ""
    exit_code: int | None = None
    share: float | None = None
    """Of the limit that is spent."""
    host: str = field(default_factory=socket.gethostname)
    launch: str | None = field(default_factory=lambda: os.environ.get(PASSED))
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""

    @property
    def text(self) -> str:
        """The event in one line."""
        saved = (
            f"step {self.step}{f' of {self.steps}' if self.steps else ''} is saved" if self.step else "nothing saved"
        )
        code = f" (exit code {self.exit_code})" if self.exit_code else ""
        line = {
            "finished": f"finished: {self.step} steps",
            "failed": f"failed{code}: {self.reason}; {saved}",
            "preempted": f"was preempted and can resume{code}: {self.reason}",
            "stopped": f"was stopped: {self.reason}",
            "resumed": f"resumed from step {self.step}{f' of {self.steps}' if self.steps else ''}",
            "budget": f"has spent {self.share or 0:.0%} of {self.reason}",
        }[self.event]
        return f"{self.run} {line}"

    def json(self) -> bytes:
        """One object on one line; `text` is what Slack shows, `content` is the same for Discord."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return (json.dumps({"text": self.text, "content": self.text} | values) + "\n").encode()

    def environment(self) -> dict[str, str]:
        """The variables that a command gets; empty where a value is not known."""
        code = "" if self.exit_code is None else str(self.exit_code)
        values = {"EVENT": self.event, "RUN": self.run, "STATE": self.state, "STEP": str(self.step)}
        return {
            f"DTRAIN_{name}": value for name, value in (values | {"REASON": self.reason, "EXIT_CODE": code}).items()
        }


class Channel(Protocol):
    """Where notifications go."""

    @property
    def name(self) -> str:
        """What a warning calls it."""
        ...

    def deliver(self, notification: Notification) -> str:
        """Why it was not delivered; empty where it was. Takes at most about LIMIT seconds."""
        ...


@dataclass(frozen=True)
class Webhook:
    """An HTTP endpoint, known by the name of the environment variable that holds its URL."""

    variable: str
    url: str = field(repr=False)

    @property
    def name(self) -> str:
        return f"the webhook in {self.variable}"

    def deliver(self, notification: Notification) -> str:
        """POST, up to three times where the endpoint does not answer, or answers with 429 or 5xx."""
        headers = {"Content-Type": "application/json", "User-Agent": f"dtrain/{__version__}"}
        request = urllib.request.Request(self.url, notification.json(), headers, method="POST")
        end, problem = time.monotonic() + LIMIT - 1, ""
        for pause in PAUSES:
            time.sleep(pause)
            left = end - time.monotonic()
            if left <= 0:
                break
            problem, final = _post(request, min(TIMEOUT, left))
            if final:
                break
        return problem


@dataclass(frozen=True)
class Command:
    """A program on this machine; its output is discarded."""

    words: Sequence[str]

    @property
    def name(self) -> str:
        return f"the command {self.words[0]}"

    def deliver(self, notification: Notification) -> str:
        inherited = {k: v for k, v in os.environ.items() if k == PASSED or not k.startswith("DTRAIN_")}
        try:
            running = subprocess.Popen(
                self.words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=inherited | notification.environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return cause(error)
        try:
            running.communicate(notification.json(), timeout=COMMAND)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            return f"it took longer than {COMMAND:.0f} s and was killed"
        return f"it ended with {running.returncode}" if running.returncode else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET without its body: it counts as a failure."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def _post(request: urllib.request.Request, seconds: float) -> tuple[str, bool]:
    """What went wrong, and whether another try would give the same."""
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=seconds):
            return "", True
    except HTTPError as error:
        error.close()
        return f"HTTP status {error.code}", error.code < 500 and error.code != 429
    except (OSError, HTTPException) as error:  # URLError is an OSError
        return _without_url(error), False


def _without_url(error: Exception) -> str:
    """The cause of a failed request; the text of some errors quotes the URL, so only known ones are shown."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return "no answer"
    if isinstance(reason, OSError) and not isinstance(reason, ssl.SSLError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__
