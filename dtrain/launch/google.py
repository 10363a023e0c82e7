"""What a host on Google Cloud asks without a key: its metadata server, and with the token from there the interfaces.

Both are found where Google's own tools find them: GCE_METADATA_HOST and CLOUDSDK_API_ENDPOINT_OVERRIDES_* are heeded.
"""

import base64
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from dtrain.errors import EnvironmentFault

WAIT = 10.0
PAUSES = (1.0, 2.0, 5.0, 10.0, 20.0)
"""Seconds until it is asked again."""
PASSING = {401, 408, 429}
"""Refusals that may pass: a token that was not to be had, too many at once."""
METADATA = "metadata.google.internal"


def metadata(path: str) -> str | None:
    """A value of the metadata server, as instance/attributes/x; None where it has none, or cannot be asked."""
    place = f"http://{os.environ.get('GCE_METADATA_HOST', METADATA)}/computeMetadata/v1/{path}"
    try:
        return _answer(urllib.request.Request(place, headers={"Metadata-Flavor": "Google"})).decode()
    except (OSError, ValueError):
        return None


def ask(method: str, service: str, path: str) -> dict[str, Any]:
    """The answer of one of the interfaces: tpu, compute, secretmanager; asked again where it may pass.

    EnvironmentFault in its words."""
    for pause in (*PAUSES, None):
        try:
            return _asked(method, service, path)
        except (OSError, ValueError) as error:
            code = error.code if isinstance(error, urllib.error.HTTPError) else 0
            if pause is None or (400 <= code < 500 and code not in PASSING):
                said = f"{code}, {_words(error)}" if isinstance(error, urllib.error.HTTPError) else str(error)
                raise EnvironmentFault(f"{method} {service} {path}: {said}") from error
            time.sleep(pause)
    raise AssertionError


def _asked(method: str, service: str, path: str) -> dict[str, Any]:
    base = os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service.upper()}", _endpoint(service))
    token = json.loads(metadata("instance/service-accounts/default/token") or "{}").get("access_token", "")
    given = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return json.loads(_answer(urllib.request.Request(base + path, method=method, headers=given)) or b"{}")


def secret(project: str, name: str) -> str:
    """The newest version of a secret of Secret Manager. EnvironmentFault where it cannot be read."""
    found = ask("GET", "secretmanager", f"v1/projects/{project}/secrets/{name}/versions/latest:access")
    return base64.b64decode(found["payload"]["data"]).decode()


def _endpoint(service: str) -> str:
    return f"https://{service}.googleapis.com/" + ("compute/v1/" if service == "compute" else "")


def _answer(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        return answer.read()


def _words(error: urllib.error.HTTPError) -> str:
    try:
        return json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return error.reason
