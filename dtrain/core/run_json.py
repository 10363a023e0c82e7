"""What run.json holds under each key, and whether a value is that."""

from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 1e300
STATES = {"running", "finished", "stopped", "failed", "aborted"}


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _table(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(holds, value.values()))


FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "state": (f"one of {', '.join(sorted(STATES))}", lambda value: isinstance(value, str) and value in STATES),
    **dict.fromkeys(("name", "reason", "git"), ("text", lambda value: isinstance(value, str))),
    **dict.fromkeys(("step", "steps", "starts", "went_back", "next_batch"), ("a whole number", _natural)),
    **dict.fromkeys(("started", "written", "step_s_kept"), ("a number", _number)),
    "ended": ("a number", lambda value: value is None or _number(value)),
    "exit_code": ("a whole number", lambda value: value is None or _natural(value)),
    **dict.fromkeys(("lost", "seconds"), ("a table of numbers", lambda value: _table(value, _number))),
    **dict.fromkeys(
        ("versions", "tracker_ids"),
        ("a table of texts", lambda value: _table(value, lambda text: isinstance(text, str))),
    ),
    "rising": ("a table of true and false", lambda value: _table(value, lambda up: isinstance(up, bool))),
    "topology": ("a table", lambda value: isinstance(value, dict)),
}
"""What run.json holds under each key, and whether a value is that."""


def wrong_value(found: Mapping[str, Any]) -> str:
    """Which value is not what its key holds, and what that is; empty where all are."""
    for key, (wanted, holds) in FIELDS.items():
        if key in found and not holds(found[key]):
            return f"{key} is {found[key]!r:.80}, not {wanted}"
    return ""
