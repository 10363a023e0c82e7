"""The recipe's `track.notify`: which events of a run are sent, and where to."""

import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args
from urllib.parse import urlsplit

from annotated_types import Gt, Le, MinLen

from dtrain.core.errors import EnvironmentFault, FieldError

if TYPE_CHECKING:
    from dtrain.track.delivery import Channel

Event = Literal["finished", "failed", "preempted", "stopped", "resumed", "budget"]
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Notify:
    """Who is notified of a run's events: a command, a webhook, or both."""

    command: tuple[str, ...] = ()
    """A program and its arguments, run without a shell on the first host; the event is JSON on its standard input."""
    webhook: str | None = None
    """The name of the environment variable that holds the URL; the event is posted to it as JSON."""
    on: Annotated[tuple[Event, ...], MinLen(1)] = get_args(Event)
    """The events that are sent."""
    share: Annotated[float, Gt(0), Le(1)] = 0.8
    """The part of the run's time limit after which `budget` is sent."""

    def __post_init__(self) -> None:
        if not self.command and self.webhook is None:
            raise FieldError("", "nobody is notified: neither command nor webhook is set", "set one, or leave it out")
        if self.webhook is not None and not VARIABLE.fullmatch(self.webhook):
            message = "not the name of an environment variable (capital letters, digits and '_')"
            raise FieldError("webhook", message, "put the URL into the environment and its name here, as SLACK_WEBHOOK")

    def channels(self) -> "list[Channel]":
        """Where notifications go; EnvironmentFault where the command or the variable is not there."""
        from dtrain.track.delivery import Command, Webhook

        found: list[Channel] = []
        if self.webhook is not None:
            found.append(Webhook(self.webhook, _url(self.webhook)))
        if self.command:
            if not shutil.which(self.command[0]):
                hint = "give its words as a list" if " " in self.command[0] else "install it, or give its path"
                raise EnvironmentFault(f"track.notify.command: no program {self.command[0]!r} here", hint)
            found.append(Command(self.command))
        return found


def _url(variable: str) -> str:
    """The address that the variable holds; EnvironmentFault, which does not show it, where it holds none."""
    url = os.environ.get(variable, "").strip()
    if not url:
        message = f"track.notify.webhook: the environment variable {variable} is not set"
        raise EnvironmentFault(message, f"export {variable}=..., or leave track.notify out: track.notify=null")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
        usable = usable and parts.port != 0 and url.isascii() and url.isprintable() and " " not in url
    except ValueError:
        usable = False
    if not usable:
        message = f"track.notify.webhook: the environment variable {variable} holds no http:// or https:// address"
        raise EnvironmentFault(message, "its value is a secret and not shown")
    return url
