"""Buckets, with the account of this machine: checks by gcloud, and the stop requests in them."""

import json
import secrets

from dtrain.core.errors import EnvironmentFault
from dtrain.launch.commands import run

ABSENT, FORBIDDEN = "not found: 404", "does not have permission"
"""What gcloud prints of a bucket that does not exist, and of what its account may not do."""
NO_OBJECT = "matched no objects"
"""What gcloud prints where an object does not exist; aws removes such a one without an error."""
TOOLS = {"gs": ("gcloud", "storage"), "s3": ("aws", "s3")}


def check_bucket(url: str, writer: str = "") -> list[str]:
    """Whether the bucket at `url`, as gs://my-runs, exists and takes an object, which is deleted again.

    `writer` names the account that the run writes with, where it is another than that of this machine: what this
    machine may not do is then a note. EnvironmentFault where the bucket does not exist or cannot be written."""
    if not url.startswith("gs://"):
        return [f"not checked: {url}: only buckets of Google Cloud are"]
    notes: list[str] = []
    try:
        notes += _settings(url)
        _write_and_remove(url)
    except EnvironmentFault as error:
        if ABSENT in error.message:
            raise EnvironmentFault(f"there is no bucket {url}", f"gcloud storage buckets create {url}") from error
        if FORBIDDEN in error.message and not writer:
            raise
        return [*notes, f"not checked: that {writer or 'the run'} may write to {url}: {error.message}"]
    return [*notes, *([f"not checked: that {writer} may write to {url}; this account may"] if writer else [])]


def stop_url(bucket: str, name: str) -> str:
    """Of the stop request of the run `name`, whose folder is in the bucket at the URL `bucket`."""
    return f"{bucket}/{name}/stop"


def write_object(url: str, text: str) -> None:
    """Write an object, as gs://my-runs/name/stop or s3://... EnvironmentFault where that fails."""
    run([*_tool(url), "cp", "-", url], given=text)


def remove_object(url: str) -> None:
    """Remove an object, or nothing where it does not exist. EnvironmentFault where that fails."""
    try:
        run([*_tool(url), "rm", url])
    except EnvironmentFault as error:
        if NO_OBJECT not in error.message:
            raise


def check_stop_request(url: str) -> list[str]:
    """A note where the stop request of an earlier launch is at the URL of Google Cloud, or cannot be looked for.

    EnvironmentFault where it is there and this account may not remove objects. Leaves it as it is."""
    there, notes = _look_for(url)
    if not there:
        return notes
    try:
        _write_and_remove("/".join(url.split("/")[:3]))
    except EnvironmentFault as error:
        raise _in_the_way(url, error) from error
    return [f"{url} is the stop request of an earlier launch, which `up` removes"]


def remove_stop_request(url: str) -> list[str]:
    """Remove the stop request of an earlier launch at the URL of Google Cloud; a note where that is not known to be.

    EnvironmentFault where it is there and stays."""
    try:
        remove_object(url)
    except EnvironmentFault as error:
        there, notes = _look_for(url)
        if there:
            raise _in_the_way(url, error) from error
        return notes
    return []


def _look_for(url: str) -> tuple[bool, list[str]]:
    """Whether a stop request is there; with a note where that cannot be seen."""
    try:
        run(["gcloud", "storage", "ls", url])
    except EnvironmentFault as error:
        what = f"not checked: that {url} is absent; a run that finds this stop request ends at once: {error.message}"
        return False, [] if NO_OBJECT in error.message else [what]
    return True, []


def _in_the_way(url: str, error: EnvironmentFault) -> EnvironmentFault:
    message = f"{url} is a stop request, at which the run would end at once, and cannot be removed: {error.message}"
    return EnvironmentFault(message, f"with an account that may: {' '.join(_tool(url))} rm {url}")


def _tool(url: str) -> tuple[str, str]:
    return TOOLS[url.partition(":")[0]]


def _write_and_remove(url: str) -> None:
    """An object of its own in the bucket at `url`."""
    probe = f"{url}/dtrain-check-{secrets.token_hex(4)}"
    write_object(probe, "dtrain\n")
    run(["gcloud", "storage", "rm", probe])


def _settings(url: str) -> list[str]:
    """What is worth knowing of how it is set up, where this account may see that."""
    try:
        found = json.loads(run(["gcloud", "storage", "buckets", "describe", url, "--raw", "--format=json"]))
    except EnvironmentFault as error:
        if FORBIDDEN not in error.message:
            raise
        return [f"not checked: the settings of {url}, which this account may not read"]
    if days := int(found.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0)) // 86400:
        return [f"{url} keeps, and bills, deleted checkpoints for {days} days more (soft delete)"]
    return []
