"""The recipe section `track.notify`: which events of a run are sent, and to which destinations."""

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
    """Sends the events of a run to a command, a webhook, or both."""

    command: tuple[str, ...] = ()
    """A program and its arguments, run without a shell on the first host; it gets the event as JSON on its standard
    input."""
    webhook: str | None = None
    """Name of the environment variable that contains the URL; the event is sent there as JSON by HTTP POST."""
    on: Annotated[tuple[Event, ...], MinLen(1)] = get_args(Event)
    """The events that are sent."""
    share: Annotated[float, Gt(0), Le(1)] = 0.8
    """Fraction of the run's time limit after which `budget` is sent."""

    def __post_init__(self) -> None:
        if not self.command and self.webhook is None:
            raise FieldError("", "neither command nor webhook is set", "set one of them, or remove track.notify")
        if self.webhook is not None and not VARIABLE.fullmatch(self.webhook):
            message = "not the name of an environment variable (capital letters, digits and '_')"
            hint = "put the URL into an environment variable and its name here, for example SLACK_WEBHOOK"
            raise FieldError("webhook", message, hint)

    def channels(self) -> "list[Channel]":
        """The destinations; EnvironmentFault if the command or the environment variable does not exist."""
        from dtrain.track.delivery import Command, Webhook

        channels: list[Channel] = []
        if self.webhook is not None:
            channels.append(Webhook(self.webhook, _url(self.webhook)))
        if self.command:
            if not shutil.which(self.command[0]):
                as_list = "write the program and its arguments as a list"
                hint = as_list if " " in self.command[0] else "install it, or give its full path"
                raise EnvironmentFault(f"track.notify.command: no program {self.command[0]!r} on this machine", hint)
            channels.append(Command(self.command))
        return channels


def _url(variable: str) -> str:
    """The URL in the variable; EnvironmentFault if it is not an HTTP URL. The message does not show the value."""
    url = os.environ.get(variable, "").strip()
    if not url:
        message = f"track.notify.webhook: the environment variable {variable} is not set"
        raise EnvironmentFault(message, f"export {variable}=..., or disable notifications: track.notify=null")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
        usable = usable and parts.port != 0 and url.isascii() and url.isprintable() and " " not in url
    except ValueError:
        usable = False
    if not usable:
        message = f"track.notify.webhook: the environment variable {variable} is not a valid http:// or https:// URL"
        raise EnvironmentFault(message, "correct its value, which is a secret and not shown here")
    return url
