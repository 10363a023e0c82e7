"""The time of a run over all its starts: seconds by section, and those lost by cause. Together they are its wall time.

Steps that no checkpoint saved are computed again after a restart: their time counts as lost, not as time of steps.
"""

import time
from collections.abc import Mapping

from dtrain.core import heartbeat, signals
from dtrain.core.run_json import RECOMPUTED, STEP_PARTS, STOPPED_BY_USER, step_seconds
from dtrain.core.types import JsonObject


def total(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Seconds by section, of earlier starts and of this one."""
    return {name: round(before.get(name, 0.0) + now.get(name, 0.0), 3) for name in sorted(before.keys() | now.keys())}


def steps_changed(seconds: Mapping[str, float], change: float) -> dict[str, float]:
    """`change` of the time of steps, spread over the parts of a step in proportion to their seconds."""
    parts = {part: seconds[part] for part in STEP_PARTS if seconds.get(part, 0.0) > 0}
    whole = sum(parts.values())
    return {part: change * value / whole for part, value in parts.items()} if parts else {STEP_PARTS[0]: change}


def earlier(old: JsonObject) -> dict[str, float]:
    """Seconds of earlier starts by section; of steps, only those that a checkpoint saved."""
    seconds = dict(old.get("seconds", {}))
    spent = step_seconds(seconds)
    if not spent or "step_s_kept" not in old:
        return seconds
    changes = steps_changed(seconds, old["step_s_kept"] - spent)
    return seconds | {part: seconds[part] + change for part, change in changes.items()}


def lost(old: JsonObject, latest: heartbeat.Heartbeat | None, start: float) -> dict[str, float]:
    """Seconds lost so far, by cause, including the gap before this start, which began at `start` (Unix time).

    Work after run.json was last written is recomputed (`recomputed_s`); after the last heartbeat the run was down.
    """
    so_far = dict(old.get("lost", {}))
    if not old:
        return so_far
    killed, written = old.get("state") == "running", old.get("written", start)
    last = min(max(written, latest.at if killed and latest else written), start)
    spent = step_seconds(old.get("seconds", {}))
    recomputed = last - written + max(spent - old.get("step_s_kept", spent), 0.0)
    for name, seconds in ((RECOMPUTED, recomputed), (gap(old), start - last)):
        if seconds > 0:
            so_far[name] = round(so_far.get(name, 0.0) + seconds, 3)
    return so_far


def gap(old: JsonObject) -> str:
    """The key of the time between the last start of a run and the next: a pause if the run waited for its user."""
    paused = old["state"] == "finished" or (old["state"] == "stopped" and old.get("stopped_by") in STOPPED_BY_USER)
    return "pause_s" if paused else f"down_{'killed' if old['state'] == 'running' else old['state']}_s"


def process_start() -> float:
    """Seconds since this process was started by the `dtrain` command; 0 in another program."""
    listener = signals.current()
    return time.perf_counter() - listener.began if listener and listener.began else 0.0
