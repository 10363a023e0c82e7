"""A JobSet as Kubernetes returns it: which launch made it, how it stands, how long it has had its nodes."""

import time
from datetime import datetime
from typing import Any

from dtrain.errors import DtrainError
from dtrain.launch.gke_manifest import LABEL
from dtrain.launch.job import Row

COUNTS = ("active", "ready", "succeeded", "failed")


def launch_of(found: Any) -> str:
    """The id of the launch that made it; empty where dtrain did not make it."""
    return found["metadata"].get("labels", {}).get(LABEL) or ""


def _times(found: Any) -> dict[tuple[str, str], str]:
    """When each condition came to be True or False."""
    return {
        (one["type"], one["status"]): one["lastTransitionTime"] for one in found.get("status", {}).get("conditions", [])
    }


def ended(found: Any) -> str:
    """completed or failed, where it has ended."""
    return next((word for word in ("Completed", "Failed") if (word, "True") in _times(found)), "").lower()


def seconds(found: Any) -> float | None:
    """How long it has had its nodes: since Kueue let it start, or since it was made. None while it waits."""
    times, end = _times(found), time.time()
    if found["spec"].get("suspend"):
        return None
    began = times.get(("Suspended", "False")) or found["metadata"]["creationTimestamp"]
    if word := ended(found):
        end = datetime.fromisoformat(times[word.capitalize(), "True"]).timestamp()
    return end - datetime.fromisoformat(began).timestamp()


def rows(found: Any) -> list[Row]:
    """One of the JobSet, with its exit code where it has ended, and one with that code for each group of its Jobs."""
    status = found.get("status", {})
    state = ended(found) or ("waiting" if found["spec"].get("suspend") else "running")
    code = {"completed": 0, "failed": DtrainError.exit_code}.get(state)
    jobs = [
        Row(one["name"], "jobs", ", ".join(f"{one.get(word, 0)} {word}" for word in COUNTS), code)
        for one in status.get("replicatedJobsStatus", [])
    ]
    what = f"restarted {status.get('restarts', 0)} times"
    return [Row(f"jobset {found['metadata']['name']}", state, what, code, seconds(found)), *jobs]
