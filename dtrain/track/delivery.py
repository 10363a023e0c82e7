"""Deliver notifications: as JSON to a webhook, or on the standard input of a command.

Delivery returns an error text instead of raising, and the text never contains the webhook's URL, which is a secret.
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
from typing import Protocol
from urllib.error import HTTPError

from dtrain import __version__
from dtrain.core.errors import cause
from dtrain.core.process_info import LAUNCH

LIMIT = 10.0
"""Maximum seconds that a run waits for the delivery of a notification."""
TIMEOUT = 4.0
"""Timeout of one request in seconds."""
PAUSES = (0.0, 0.5, 1.0)
"""Seconds before each attempt of a request."""
COMMAND = 8.0
"""Timeout of a command in seconds, after which it is killed."""
LONGEST = 500
"""Maximum length of a reason in characters: Slack and Discord reject long texts."""
PASSED = LAUNCH
"""The only DTRAIN_ variable that a command inherits; the others would make a run that it starts part of this run."""


@dataclass(frozen=True, kw_only=True)
class Notification:
    """One event of a run, with the values that the receiver gets."""

    event: str
    run: str
    """Name of the run."""
    state: str
    step: int
    """The newest saved step; 0 if nothing is saved."""
    steps: int | None = None
    reason: str = ""
    exit_code: int | None = None
    share: float | None = None
    """The used fraction of the time limit, for `budget`."""
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
            "budget": f"has used {self.share or 0:.0%} of {self.reason}",
        }[self.event]
        return f"{self.run} {line}"

    def json(self) -> bytes:
        """The event as a JSON object on one line; Slack displays `text`, Discord the equal `content`."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return (json.dumps({"text": self.text, "content": self.text} | values) + "\n").encode()

    def environment(self) -> dict[str, str]:
        """The environment variables for a command; a value that is not known is empty."""
        code = "" if self.exit_code is None else str(self.exit_code)
        values = {"EVENT": self.event, "RUN": self.run, "STATE": self.state, "STEP": str(self.step)}
        return {
            f"DTRAIN_{name}": value for name, value in (values | {"REASON": self.reason, "EXIT_CODE": code}).items()
        }


class Channel(Protocol):
    """A destination of notifications."""

    @property
    def name(self) -> str:
        """Its description in warnings."""
        ...

    def deliver(self, notification: Notification) -> str:
        """Deliver a notification within about LIMIT seconds; returns the reason of a failure, empty on success."""
        ...


@dataclass(frozen=True)
class Webhook:
    """An HTTP endpoint, identified in messages by the name of the environment variable that contains its URL."""

    variable: str
    url: str = field(repr=False)

    @property
    def name(self) -> str:
        return f"the webhook in {self.variable}"

    def deliver(self, notification: Notification) -> str:
        """POST the event, with up to two retries if the endpoint does not respond or responds with 429 or 5xx."""
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
        return f"it exited with code {running.returncode}" if running.returncode else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as a failure, because a redirected POST would become a GET without the body."""

    def redirect_request(
        self, req: object, fp: object, code: object, msg: object, headers: object, newurl: object
    ) -> None:
        return None


def _post(request: urllib.request.Request, seconds: float) -> tuple[str, bool]:
    """Send a request; returns the error text, empty on success, and whether a retry would be pointless."""
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=seconds):
            return "", True
    except HTTPError as error:
        error.close()
        return f"HTTP status {error.code}", error.code < 500 and error.code != 429
    except (OSError, HTTPException) as error:  # URLError is an OSError
        return _without_url(error), False


def _without_url(error: Exception) -> str:
    """The cause of a failed request; some error texts contain the URL, so only texts known to be safe are returned."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return "no response before the timeout"
    if isinstance(reason, OSError) and not isinstance(reason, ssl.SSLError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__
