"""Storage buckets, accessed with this machine's account: checks by gcloud, and stop requests stored in a bucket."""

import json
import secrets

from dtrain.core.errors import EnvironmentFault
from dtrain.launch.commands import run

ABSENT, FORBIDDEN = "not found: 404", "does not have permission"
"""Parts of gcloud's messages: the bucket does not exist; the account lacks a permission."""
NO_OBJECT = "matched no objects"
"""Part of gcloud's message for an object that does not exist; `aws s3 rm` reports no error for one."""
TOOLS = {"gs": ("gcloud", "storage"), "s3": ("aws", "s3")}


def check_bucket(url: str, writer: str = "") -> list[str]:
    """Check that the bucket at `url`, as gs://my-runs, exists and is writable, by a test object that is deleted again.

    `writer` names the account that the run writes with, if it is not this machine's account: a permission that this
    machine lacks is then a note. Returns notes; EnvironmentFault if the bucket does not exist or is not writable."""
    if not url.startswith("gs://"):
        return [f"not checked: {url}: only buckets of Google Cloud can be checked"]
    notes: list[str] = []
    try:
        notes += _settings(url)
        _write_and_remove(url)
    except EnvironmentFault as error:
        if ABSENT in error.message:
            raise EnvironmentFault(f"bucket {url} does not exist", f"gcloud storage buckets create {url}") from error
        if FORBIDDEN in error.message and not writer:
            raise
        return [*notes, f"not checked: whether {writer or 'the run'} may write to {url}: {error.message}"]
    return [
        *notes,
        *([f"not checked: whether {writer} may write to {url}; this machine's account may"] if writer else []),
    ]


def stop_url(bucket: str, name: str) -> str:
    """URL of the stop request of the run `name`, whose folder is in the bucket at the URL `bucket`."""
    return f"{bucket}/{name}/stop"


def write_object(url: str, text: str) -> None:
    """Write an object to a URL such as gs://my-runs/name/stop or s3://... EnvironmentFault if that fails."""
    run([*_tool(url), "cp", "-", url], given=text)


def remove_object(url: str) -> None:
    """Remove an object, if it exists. EnvironmentFault if that fails."""
    try:
        run([*_tool(url), "rm", url])
    except EnvironmentFault as error:
        if NO_OBJECT not in error.message:
            raise


def check_stop_request(url: str) -> list[str]:
    """Return a note if the stop request of an earlier launch is at `url` (gs://), or if that cannot be checked.

    EnvironmentFault if it exists and this account may not remove objects. It is not removed."""
    there, notes = _look_for(url)
    if not there:
        return notes
    try:
        _write_and_remove("/".join(url.split("/")[:3]))
    except EnvironmentFault as error:
        raise _bucket_error(url, error) from error
    return [f"{url} is the stop request of an earlier launch, which `up` removes"]


def remove_stop_request(url: str) -> list[str]:
    """Remove the stop request of an earlier launch at `url`; return a note if its removal could not be checked.

    EnvironmentFault if it exists and could not be removed."""
    try:
        remove_object(url)
    except EnvironmentFault as error:
        there, notes = _look_for(url)
        if there:
            raise _bucket_error(url, error) from error
        return notes
    return []


def _look_for(url: str) -> tuple[bool, list[str]]:
    """Whether a stop request exists, and a note if that cannot be checked."""
    try:
        run(["gcloud", "storage", "ls", url])
    except EnvironmentFault as error:
        what = f"not checked: whether {url} is absent; a run that finds this stop request ends at once: {error.message}"
        return False, [] if NO_OBJECT in error.message else [what]
    return True, []


def _bucket_error(url: str, error: EnvironmentFault) -> EnvironmentFault:
    message = f"{url} is a stop request, which would end the run at once, and cannot be removed: {error.message}"
    return EnvironmentFault(
        message, f"remove it with an account that has the permission: {' '.join(_tool(url))} rm {url}"
    )


def _tool(url: str) -> tuple[str, str]:
    return TOOLS[url.partition(":")[0]]


def _write_and_remove(url: str) -> None:
    """Write a test object with a unique name to the bucket at `url`, and remove it."""
    probe = f"{url}/dtrain-check-{secrets.token_hex(4)}"
    write_object(probe, "dtrain\n")
    run(["gcloud", "storage", "rm", probe])


def _settings(url: str) -> list[str]:
    """Notes on the settings of the bucket, if this account may read them."""
    try:
        settings = json.loads(run(["gcloud", "storage", "buckets", "describe", url, "--raw", "--format=json"]))
    except EnvironmentFault as error:
        if FORBIDDEN not in error.message:
            raise
        return [f"not checked: the settings of {url}, which this account may not read"]
    if days := int(settings.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0)) // 86400:
        return [f"{url} keeps, and bills, deleted checkpoints for {days} days more (soft delete)"]
    return []
