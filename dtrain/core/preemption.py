"""Preemption notices from the machine's metadata server, handled like SIGTERM: save and exit with code 75.

Google Cloud and AWS announce the preemption of a spot machine there, 30 and 120 seconds in advance. Not every launcher
forwards these notices; SkyPilot does not. DTRAIN_METADATA selects the vendor, and a thread in each training process
polls the server. As in the vendors' own libraries, GCE_METADATA_HOST and AWS_EC2_METADATA_SERVICE_ENDPOINT override
the server's address.
"""

import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping

from dtrain.core.errors import EnvironmentFault
from dtrain.core.process_info import METADATA

ASK = 60
"""Seconds that a request to Google's server waits for the value to change (long polling)."""
POLL = 5.0
"""Seconds between requests to AWS, which has no long polling, and after a failed request to either vendor."""
TIMEOUT = 10.0
"""Seconds that a request may take; for Google, in addition to ASK."""
TOKEN_S = 21600
"""Lifetime in seconds of an AWS session token (IMDSv2)."""
GOOGLE_HEADERS = {"Metadata-Flavor": "Google"}

Act = Callable[[str], object]
"""Called with the text of a notice."""
Answer = tuple[str, Mapping[str, str]]
"""Body and headers of a response."""


def watch(act: Act | None = None) -> None:
    """Start to poll the metadata server of the vendor in DTRAIN_METADATA; do nothing if the variable is not set.

    `act` is called with the text of a notice; by default it sends SIGTERM to this process. EnvironmentFault if the
    vendor is unknown.
    """
    vendor = os.environ.get(METADATA)
    if not vendor:
        return
    if vendor not in WATCHERS:
        raise EnvironmentFault(f"{METADATA}={vendor} is not one of {', '.join(WATCHERS)}")
    for watcher in WATCHERS[vendor]:
        threading.Thread(target=watcher, args=(act or _terminate,), name="preemption", daemon=True).start()


def _terminate(notice: str) -> None:
    sys.stderr.write(f"{notice}\n")
    os.kill(os.getpid(), signal.SIGTERM)


def _google_preempted(act: Act) -> None:
    """A spot machine is preempted in 30 seconds; also reported if the notice came before this process started."""
    for value, _ in _google_values("instance/preempted"):
        if value == "TRUE":
            act("Google Cloud preempts this machine")
            return


def _google_maintenance(act: Act) -> None:
    """A machine that cannot be migrated is terminated for maintenance. Only a change of the value counts: the event is
    announced up to an hour in advance, and a run that is restarted on the same machine should use that hour."""
    for value, first in _google_values("instance/maintenance-event"):
        if value == "TERMINATE_ON_HOST_MAINTENANCE" and not first:
            act("Google Cloud terminates this machine for maintenance")
            return


def _google_values(name: str) -> Iterator[tuple[str, bool]]:
    """Yield a value of Google's metadata server whenever it may have changed, and whether it is the first one."""
    host, etag, failed = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal"), "", False
    while True:
        wait = f"?wait_for_change=true&timeout_sec={ASK}&last_etag={etag}" if etag else ""
        try:
            value, headers = _get(f"http://{host}/computeMetadata/v1/{name}{wait}", GOOGLE_HEADERS, ASK + TIMEOUT)
        except (OSError, ValueError) as error:
            failed = failed or _warn(error)
            time.sleep(POLL)
            continue
        yield value.strip(), not etag
        etag = headers.get("ETag") or "0"


def _aws_spot(act: Act) -> None:
    """A spot machine is stopped, terminated or hibernated in two minutes."""
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    token, failed = "", False
    while True:
        try:
            if not token:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
                token, _ = _get(f"{base}/latest/api/token", headers, TIMEOUT, "PUT")
            headers = {"X-aws-ec2-metadata-token": token}
            text, _ = _get(f"{base}/latest/meta-data/spot/instance-action", headers, TIMEOUT)
            act(f"AWS preempts this machine: {json.loads(text)['action']}")
            return
        except urllib.error.HTTPError as error:
            token = "" if error.code == 401 else token  # 404 means no notice, 401 that the token has expired
        except (OSError, ValueError, KeyError, TypeError) as error:
            failed = failed or _warn(error)
        time.sleep(POLL)


WATCHERS = {"google": (_google_preempted, _google_maintenance), "aws": (_aws_spot,)}


def _get(url: str, headers: Mapping[str, str], timeout: float, method: str = "GET") -> Answer:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy: the address is link-local
    with opener.open(request, timeout=timeout) as answer:
        return answer.read().decode(), answer.headers


def _warn(error: Exception) -> bool:
    reason = getattr(error, "reason", None) or error
    sys.stderr.write(f"warning: the metadata server does not respond: {reason}; preemption notices may be missed\n")
    return True
