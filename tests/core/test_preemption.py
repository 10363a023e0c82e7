"""Preemption notices from a test server in place of the machine's metadata server."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, Queue
from urllib.parse import parse_qs, urlsplit

import pytest

from dtrain.core import preemption
from dtrain.core.errors import EnvironmentFault

GOOGLE = "/computeMetadata/v1/instance/"
AWS = "/latest/meta-data/spot/instance-action"


@dataclass
class Server:
    """Values by path. A request with wait_for_change is answered when the value differs from the caller's ETag."""

    values: dict[str, str]
    port: int = 0
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def set(self, path: str, value: str) -> None:
        with self.changed:
            self.values[path] = value
            self.changed.notify_all()

    def answer(self, url: str) -> str | None:
        path, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        with self.changed:
            if query.get("wait_for_change"):
                assert query["timeout_sec"] == ["60"]
                etag = query["last_etag"][0]
                self.changed.wait_for(lambda: str(abs(hash(self.values[path]))) != etag, 10)
            return self.values.get(path)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server({f"{GOOGLE}preempted": "FALSE", f"{GOOGLE}maintenance-event": "NONE", "/latest/api/token": "key"})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
            value = state.answer(self.path)
            self.send_response(200 if value is not None else 404)
            self.send_header("ETag", str(abs(hash(value))))
            self.end_headers()
            self.wfile.write((value or "").encode())

        do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.port = http.server_address[1]
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield state
        http.shutdown()


@pytest.fixture
def notices(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Queue[str]]:
    monkeypatch.setattr(preemption, "POLL", 0.05)
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.port}/")

    def watch(vendor: str) -> Queue[str]:
        monkeypatch.setenv("DTRAIN_METADATA", vendor)
        found: Queue[str] = Queue()
        preemption.watch(found.put)
        return found

    return watch


def silent(found: Queue[str]) -> bool:
    with pytest.raises(Empty):
        found.get(timeout=0.5)
    return True


@pytest.mark.parametrize("before", [True, False])
def test_a_preemption_by_google_is_noticed(server: Server, notices: Callable[[str], Queue[str]], before: bool) -> None:
    if before:
        server.set(f"{GOOGLE}preempted", "TRUE")
    found = notices("google")
    if not before:
        assert silent(found)
        server.set(f"{GOOGLE}preempted", "TRUE")
    assert found.get(timeout=100) == "Google Cloud preempts this machine"
    assert {headers.get("metadata-flavor") for _, _, headers in server.asked} == {"Google"}


@pytest.mark.slow
def test_maintenance_counts_only_if_it_is_announced_during_the_run(
    server: Server, notices: Callable[[str], Queue[str]]
) -> None:
    path = f"{GOOGLE}maintenance-event"
    server.set(path, "TERMINATE_ON_HOST_MAINTENANCE")
    assert silent(notices("google"))
    server.set(path, "MIGRATE_ON_HOST_MAINTENANCE")
    found = notices("google")
    assert silent(found)
    server.set(path, "TERMINATE_ON_HOST_MAINTENANCE")
    assert found.get(timeout=100) == "Google Cloud terminates this machine for maintenance"


@pytest.mark.slow
def test_a_preemption_by_aws_is_noticed(server: Server, notices: Callable[[str], Queue[str]]) -> None:
    found = notices("aws")
    assert silent(found)
    server.set(AWS, json.dumps({"action": "terminate", "time": "2026-01-01T00:00:00Z"}))
    assert found.get(timeout=100) == "AWS preempts this machine: terminate"
    methods = {(method, url) for method, url, _ in server.asked}
    assert methods == {("PUT", "/latest/api/token"), ("GET", AWS)}
    assert {headers["x-aws-ec2-metadata-token"] for method, _, headers in server.asked if method == "GET"} == {"key"}


@pytest.mark.slow
def test_a_server_that_does_not_respond_causes_one_warning_and_is_polled_again(
    server: Server, notices: Callable[[str], Queue[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    del server.values[f"{GOOGLE}preempted"]
    found = notices("google")
    assert silent(found)
    server.set(f"{GOOGLE}preempted", "TRUE")
    assert found.get(timeout=100)
    assert capfd.readouterr().err.count("warning: the metadata server does not respond") == 1


def test_an_unknown_vendor_is_refused(notices: Callable[[str], Queue[str]]) -> None:
    with pytest.raises(EnvironmentFault, match="DTRAIN_METADATA=azure is not one of google, aws"):
        notices("azure")


@pytest.mark.slow
def test_no_server_is_polled_without_a_vendor(
    server: Server, notices: Callable[[str], Queue[str]]
) -> None:  # fmt: skip
    assert silent(notices(""))
    assert not server.asked
