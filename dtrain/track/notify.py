"""The recipe section `track.notify`: which events of a run are sent, and to which destinations."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from annotated_types import Gt, Le, MinLen

from dtrain.core.errors import FieldError

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
