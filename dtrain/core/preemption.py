"""Notices of preemption from the machine's metadata server, each treated as SIGTERM: save, leave with 75.

Google Cloud and AWS announce there that a spot machine is about to be taken, 30 and 120 seconds before. What manages
the machines need not pass that on: SkyPilot does not. DTRAIN_METADATA says whose server is asked, by a thread of each
training process. The addresses can be replaced as in the vendors' own libraries: GCE_METADATA_HOST,
AWS_EC2_METADATA_SERVICE_ENDPOINT.
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
"""Seconds that Google's server may hold an answer back until the value changes."""
POLL = 5.0
"""Seconds between questions where the server answers at once, as that of AWS does, and after a failed one."""
TIMEOUT = 10.0
TOKEN_S = 21600
GOOGLE_HEADERS = {"Metadata-Flavor": "Google"}

Act = Callable[[str], object]
"""What is done about a notice, which it gets in words."""
Answer = tuple[str, Mapping[str, str]]
"""A value, and the headers that came with it."""


def watch(act: Act | None = None) -> None:
    """Ask from now on, where DTRAIN_METADATA says whom; `act` gets a notice in words, and is SIGTERM to this process
    where it is not given. EnvironmentFault where the variable names no server that is known."""
    vendor = os.environ.get(METADATA)
    if not vendor:
        return
    if vendor not in WATCHERS:
        raise EnvironmentFault(f"{METADATA}={vendor} is none of {', '.join(WATCHERS)}")
    for ask in WATCHERS[vendor]:
        threading.Thread(target=ask, args=(act or _terminate,), name="preemption", daemon=True).start()


def _terminate(notice: str) -> None:
    sys.stderr.write(f"{notice}\n")
    os.kill(os.getpid(), signal.SIGTERM)


def _google_preempted(act: Act) -> None:
    """A spot machine is taken in 30 seconds; also where that was so before this process began."""
    for value, _ in _google_values("instance/preempted"):
        if value == "TRUE":
            act("Google Cloud preempts this machine")
            return


def _google_maintenance(act: Act) -> None:
    """A machine that cannot be moved is ended for maintenance. Only a change counts: the event is announced up to an
    hour before, and a run that was started again on the same machine meanwhile should use that hour."""
    for value, first in _google_values("instance/maintenance-event"):
        if value == "TERMINATE_ON_HOST_MAINTENANCE" and not first:
            act("Google Cloud ends this machine for maintenance")
            return


def _google_values(name: str) -> Iterator[tuple[str, bool]]:
    """A value of Google's metadata server and whether it is the first one, each time that it may have changed."""
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
    """A spot machine is stopped or terminated in two minutes; hibernation is answered alike."""
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    token, failed = "", False
    while True:
        try:
            if not token:
                given = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
                token, _ = _get(f"{base}/latest/api/token", given, TIMEOUT, "PUT")
            given = {"X-aws-ec2-metadata-token": token}
            text, _ = _get(f"{base}/latest/meta-data/spot/instance-action", given, TIMEOUT)
            act(f"AWS takes this machine: {json.loads(text)['action']}")
            return
        except urllib.error.HTTPError as error:
            token = "" if error.code == 401 else token  # 404: no notice; 401: the token has expired
        except (OSError, ValueError, KeyError, TypeError) as error:
            failed = failed or _warn(error)
        time.sleep(POLL)


WATCHERS = {"google": (_google_preempted, _google_maintenance), "aws": (_aws_spot,)}


def _get(url: str, headers: Mapping[str, str], timeout: float, method: str = "GET") -> Answer:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it answers this machine alone, no proxy
    with opener.open(request, timeout=timeout) as answer:
        return answer.read().decode(), answer.headers


def _warn(error: Exception) -> bool:
    reason = getattr(error, "reason", None) or error
    sys.stderr.write(f"warning: the metadata server does not answer: {reason}; notices of preemption may be missed\n")
    return True
