"""Check the types of the values in run.json."""

from collections.abc import Callable, Mapping
from typing import Any

from dtrain.core.types import JsonObject

LARGEST = 1e300
STATES = {"running", "finished", "stopped", "failed", "aborted"}


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _table(value: object, valid: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(valid, value.values()))


def _data(value: object) -> bool:
    return (
        isinstance(value, dict)
        and all(_natural(value.get(name)) for name in ("train", "test"))
        and _number(value.get("epochs"))
    )


FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "state": (f"one of {', '.join(sorted(STATES))}", lambda value: isinstance(value, str) and value in STATES),
    **dict.fromkeys(("name", "reason", "git", "stopped_by"), ("text", lambda value: isinstance(value, str))),
    **dict.fromkeys(("step", "steps", "starts", "rollbacks", "next_batch"), ("a whole number", _natural)),
    **dict.fromkeys(("started", "written", "step_s_kept"), ("a number", _number)),
    "ended": ("a number", lambda value: value is None or _number(value)),
    "exit_code": ("a whole number", lambda value: value is None or _natural(value)),
    **dict.fromkeys(("lost", "seconds"), ("an object with numbers", lambda value: _table(value, _number))),
    **dict.fromkeys(
        ("versions", "tracker_ids", "units"),
        ("an object with texts", lambda value: _table(value, lambda text: isinstance(text, str))),
    ),
    "rising": ("an object with true or false", lambda value: _table(value, lambda up: isinstance(up, bool))),
    "changes": ("a list of objects", lambda value: isinstance(value, list) and all(isinstance(x, dict) for x in value)),
    "data": (
        "an object with numbers of train and test examples and epochs",
        lambda value: value is None or _data(value),
    ),
    "topology": ("an object", lambda value: isinstance(value, dict)),
}
"""Per key of run.json: a description of its values for messages, and a function that checks a value."""


RECOMPUTED = "recomputed_s"
"""The key of `lost` for seconds of steps that were computed again."""
STEP_PARTS = ("dispatch", "device", "host", "step")
"""The keys of `seconds` that make up the time of steps, without waiting for data; "step" is the whole in records of
versions before 0.3."""
STOPPED_BY_USER = ("SIGINT", "stop requested")
"""Values of `stopped_by` after which a run waits for its user."""


def step_seconds(seconds: Mapping[str, float]) -> float:
    """Seconds spent in steps."""
    return sum(seconds.get(part, 0.0) for part in STEP_PARTS)


def renamed(record: JsonObject) -> JsonObject:
    """The record with the keys of this version: earlier ones wrote `went_back`, and keys of `lost` with blanks."""
    if "went_back" in record:
        record = {"rollbacks" if key == "went_back" else key: value for key, value in record.items()}
    if any(" " in key for key in record.get("lost", {})):
        lost = {_lost_key(key): seconds for key, seconds in record["lost"].items()}
        record = record | {"lost": lost}
    return record


def _lost_key(key: str) -> str:
    return {"done again": RECOMPUTED}.get(key, f"{key.replace(', ', '_')}_s" if " " in key else key)


def wrong_value(record: Mapping[str, object]) -> str:
    """Describe the first value in a run record with the wrong type; empty if all are valid."""
    for key, (expected, valid) in FIELDS.items():
        if key in record and not valid(record[key]):
            return f"{key} is {record[key]!r:.80}, not {expected}"
    return ""
