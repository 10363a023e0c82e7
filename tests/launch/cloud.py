"""A cloud on this machine: the few calls of Google's that a launch makes, to which a real gcloud is pointed.

Its bucket is a folder, which hosts see as if it were mounted. What each resource is can be forced.
"""

import base64
import fnmatch
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

Body = dict[str, Any]
NAMED = {"nodes": "nodeId", "queuedResources": "queuedResourceId"}


@dataclass
class Cloud:
    """What there is, and what was asked."""

    root: Path
    port: int = 0
    resources: dict[str, Body] = field(default_factory=dict)
    """By their path, from projects/."""
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    """Whatever changed something: method, path, body."""
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    """A pattern of paths of creations, with the error that answers them."""
    secrets: dict[str, str] = field(default_factory=dict)
    fails: int = 0
    """How many requests for secrets are put off."""
    metadata: dict[str, str] = field(default_factory=dict)
    """What the metadata server answers, by host and path: 0/instance/preempted."""

    def environment(self, config: Path) -> dict[str, str]:
        """With which gcloud comes here, and a host's dtrain."""
        here = self._here
        return {
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{here}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{here}/compute/v1/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{here}/storage/v1/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER": f"{here}/",
            "CLOUDSDK_AUTH_ACCESS_TOKEN": "fake",
            "CLOUDSDK_CONFIG": str(config),
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
        }

    def named(self, name: str) -> Body | None:
        """The resource of that name."""
        return next((one for path, one in self.resources.items() if path.endswith(f"/{name}")), None)

    def force(self, name: str, state: str) -> None:
        """Put a node or a queued resource into a state."""
        found = self.named(name)
        assert found
        found["state"] = {"state": state} if "queuedResources" in found["name"] else state

    def created(self) -> list[str]:
        """The paths of what was created, in order."""
        return [path for method, path, _ in self.calls if method == "POST" and "/locations/" in path]

    def answer(self, method: str, address: str, kind: str, body: bytes) -> tuple[int, Any]:
        """Status and content, which is JSON where it is not bytes."""
        path, query = urlsplit(address).path, parse_qs(urlsplit(address).query)
        if "/storage/v1/" in path:
            return self._storage(method, path, query, kind, body)
        if "/computeMetadata/v1/" in path:
            return self._told(path)
        if method != "GET" and not path.endswith("/listManagedInstances"):
            self.calls.append((method, path, json.loads(body) if body else None))
        if secret := re.search(r"/secrets/(\w+)/versions/latest:access", path):
            if self.fails:
                self.fails -= 1
                return 503, _error(503, "not now")
            found = self.secrets.get(secret[1])
            data = {"payload": {"data": base64.b64encode((found or "").encode()).decode()}}
            return (200, data) if found else (404, _error(404, f"Secret [{secret[1]}] not found"))
        if "/operations/" in path:
            return 200, _operation(path, self.port)
        path = path.removeprefix("/v2/").removeprefix("/compute/v1/")
        group = path.removesuffix("/listManagedInstances")
        return self._resource(method, path, query, body) if group == path else self._managed(group)

    def _told(self, path: str) -> tuple[int, Any]:
        """What the metadata server answers a host."""
        host, _, what = path.lstrip("/").partition("/computeMetadata/v1/")
        if what == "instance/service-accounts/default/token":
            return 200, {"access_token": "fake", "expires_in": 3600}
        found = self.metadata.get(f"{host}/{what}")
        return (200, found.encode()) if found is not None else (404, {})

    def _resource(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        if method == "POST":
            return self._create(path, query, json.loads(body))
        found = {name: one for name, one in self.resources.items() if name == path or name.startswith(f"{path}/")}
        if method == "DELETE":
            if path not in self.resources:
                return 404, _error(404, f"Resource '{path}' was not found")
            for name in found:
                self.resources.pop(name)
            return 200, _operation(path, self.port, "delete")
        there = {"items": []} if path.endswith("/autoscalers") else self.resources.get(path)
        if "/images/family/" in path:
            there = {"name": path.rpartition("/")[2], "selfLink": f"{self._here}/compute/v1/{path}"}
        if there is not None:
            return 200, there
        return 404, _error(404, f"Resource '{path}' was not found")

    def _managed(self, group: str) -> tuple[int, Any]:
        """The instances of a group, which are as the group is."""
        if group not in self.resources:
            return 404, _error(404, f"Resource '{group}' was not found")
        state, count = self.resources[group]["state"], self.resources[group]["targetSize"]
        zone, name = group.partition("/instanceGroupManagers/")[::2]
        found = [
            {"instance": f"{self._here}/compute/v1/{zone}/instances/{name}-{i}", "instanceStatus": state}
            for i in range(count)
        ]
        return 200, {"managedInstances": [one | {"currentAction": "NONE"} for one in found]}

    def _create(self, path: str, query: dict[str, list[str]], given: Body) -> tuple[int, Any]:
        for pattern, (status, message) in self.refuse.items():
            if fnmatch.fnmatch(path, pattern):
                return status, _error(status, message)
        last = path.rpartition("/")[2]
        name = f"{path}/{query[NAMED[last]][0] if last in NAMED else given['name']}"
        if name in self.resources:
            return 409, _error(409, f"Resource '{name}' already exists")
        state: Any = {"queuedResources": {"state": "ACTIVE"}, "nodes": "READY"}.get(last, "RUNNING")
        self.resources[name] = given | {"name": name if last in NAMED else given["name"], "state": state}
        status = {"isStable": True} if last == "instanceGroupManagers" else "RUNNING"
        if last not in NAMED:
            self.resources[name] |= {"status": status, "selfLink": f"{self._here}/compute/v1/{name}"}
        return 200, _operation(name, self.port)

    def _storage(self, method: str, path: str, query: dict[str, list[str]], kind: str, body: bytes) -> tuple[int, Any]:
        bucket, _, name = path.partition("/b/")[2].partition("/o")
        place, name = self.root / bucket, unquote(name.lstrip("/"))
        if not place.is_dir():
            return 404, _error(404, f"The specified bucket does not exist: {bucket}")
        if method in ("POST", "PUT"):
            return 200, self._written(bucket, name, kind, query, body)
        if not name:
            return 200, self._listed(bucket, query)
        return self._kept(method, bucket, name, query)

    def _kept(self, method: str, bucket: str, name: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        place = self.root / bucket
        if not (place / name).is_file():
            return 404, _error(404, f"No such object: {bucket}/{name}")
        if method == "DELETE":
            (place / name).unlink()
            return 204, b""
        if query.get("alt") == ["media"]:
            return 200, (place / name).read_bytes()
        return 200, self._object(bucket, name)

    def _written(self, bucket: str, name: str, kind: str, query: dict[str, list[str]], body: bytes) -> Body:
        """An upload in one request, or the first or second of two."""
        if query.get("uploadType") == ["resumable"]:
            return {"Location": f"{self._here}/storage/v1/b/{bucket}/o/{quote(json.loads(body)['name'], '')}"}
        name, content = _uploaded(kind, body) if "multipart" in kind else (name, body)
        (self.root / bucket / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / bucket / name).write_bytes(content)
        return self._object(bucket, name)

    @property
    def _here(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _listed(self, bucket: str, query: dict[str, list[str]]) -> Body:
        prefix, place = query.get("prefix", [""])[0], self.root / bucket
        files = [Path(folder, name) for folder, _, names in os.walk(place) for name in names]
        found = [one for one in sorted(str(file.relative_to(place)) for file in files) if one.startswith(prefix)]
        if not query.get("delimiter"):
            return {"items": [self._object(bucket, one) for one in found]}
        deeper = {prefix + one[len(prefix) :].partition("/")[0] + "/" for one in found if "/" in one[len(prefix) :]}
        near = [self._object(bucket, one) for one in found if "/" not in one[len(prefix) :]]
        return {"items": near, "prefixes": sorted(deeper)}

    def _object(self, bucket: str, name: str) -> Body:
        stat, content = (self.root / bucket / name).stat(), (self.root / bucket / name).read_bytes()
        link = f"{self._here}/download/storage/v1/b/{bucket}/o/{quote(name, '')}?alt=media"
        digest = base64.b64encode(hashlib.md5(content).digest()).decode()
        moment = "2026-01-01T00:00:00.000Z"
        return {
            "kind": "storage#object", "name": name, "bucket": bucket, "size": str(stat.st_size),
            "generation": str(stat.st_mtime_ns), "metageneration": "1", "timeCreated": moment, "updated": moment,
            "storageClass": "STANDARD", "mediaLink": link, "md5Hash": digest,
        }  # fmt: skip


def _uploaded(kind: str, body: bytes) -> tuple[str, bytes]:
    """Name and content of an upload in parts."""
    mark = re.search(r"boundary=['\"]?([^'\";]+)", kind)
    assert mark, kind
    parts = body.split(b"--" + mark[1].encode())[1:3]
    told, content = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in parts)
    return json.loads(told)["name"], re.sub(rb"\r?\n\Z", b"", content)


def _operation(target: str, port: int, kind: str = "insert") -> Body:
    compute = f"http://127.0.0.1:{port}/compute/v1/"
    words = target.split("/")
    parent = "/".join(words[:4] if words[2] in ("locations", "zones", "regions") else words[:3])
    if words[2] == "locations":
        return {"name": f"{parent}/operations/op", "done": True, "response": {}, "metadata": {"target": target}}
    return {
        "name": "op", "kind": "compute#operation", "status": "DONE", "operationType": kind,
        words[2].removesuffix("s"): compute + parent,
        "targetLink": compute + target, "selfLink": f"{compute}{parent}/operations/op",
    }  # fmt: skip


def _error(status: int, message: str) -> Body:
    words = {404: "NOT_FOUND", 403: "PERMISSION_DENIED", 429: "RESOURCE_EXHAUSTED", 409: "ALREADY_EXISTS"}
    return {"error": {"code": status, "message": message, "status": words.get(status, "INTERNAL")}}


@contextmanager
def serving(root: Path) -> Iterator[Cloud]:
    """The cloud, while it answers; its buckets are the folders of `root`."""
    cloud = Cloud(root)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, content = cloud.answer(self.command, self.path, self.headers.get("content-type", ""), body)
            sent = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            if isinstance(content, dict) and "Location" in content:
                self.send_header("Location", content["Location"])
            self.send_header("content-type", f"application/{'octet-stream' if sent is content else 'json'}")
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

        do_GET = do_POST = do_DELETE = do_PUT = do_PATCH = answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    cloud.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield cloud
    finally:
        server.shutdown()
        server.server_close()
