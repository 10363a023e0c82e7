"""Checks of a bucket: with a fake gcloud that prints the messages of gcloud 528, and with gcloud itself."""

import base64
import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.launch.bucket import check_bucket, check_stop_request, remove_object, remove_stop_request

ABSENT = "ERROR: (gcloud.storage.buckets.describe) gs://runs not found: 404."
DENIED = (
    "ERROR: (gcloud.storage.{}) [ada] does not have permission to access b instance [runs] (or it may not exist): "
    "ada does not have storage.{} access."
)
NO_WRITE = DENIED.format("cp", "objects.create")
NO_ACCOUNT = "ERROR: (gcloud.storage.buckets.describe) You do not currently have an active account selected."
GOOD = json.dumps({"softDeletePolicy": {"retentionDurationSeconds": "0"}})
WEEK = json.dumps({"softDeletePolicy": {"retentionDurationSeconds": "604800"}})
OWN, PODS = "", "service account trainer"


def answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, str], ask: Callable[[], list[str]]
) -> tuple[list[str], list[str]]:
    """The reported lines, and the gcloud commands that were run; an answer that begins with ERROR is a failure."""
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    (tmp_path / "gcloud").write_text(
        f"#!{sys.executable}\nimport json, sys\nfrom pathlib import Path\nroot = Path({str(tmp_path)!r})\n"
        "with (root / 'words').open('a') as file: print(sys.argv[2], file=file)\n"
        "with (root / 'lines').open('a') as file: print(*sys.argv[1:], file=file)\n"
        "answer = json.loads((root / 'answers.json').read_text()).get(sys.argv[2], '')\n"
        "print(answer, file=sys.stderr if answer.startswith('ERROR') else sys.stdout)\n"
        "sys.exit(answer.startswith('ERROR'))\n"
    )
    (tmp_path / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return ask(), (tmp_path / "words").read_text().split()


@pytest.mark.parametrize(
    ("answers", "writer", "note", "commands"),
    [
        ({"buckets": GOOD}, OWN, None, "buckets cp rm"),
        ({"buckets": GOOD}, PODS, "not checked: whether service account trainer may write", "buckets cp rm"),
        ({"buckets": WEEK}, OWN, "for 7 days more (soft delete)", "buckets cp rm"),
        ({"buckets": ABSENT}, PODS, "refused: bucket gs://runs does not exist", "buckets"),
        ({"buckets": NO_ACCOUNT}, OWN, "not checked: whether the run may write to gs://runs: gcloud", "buckets"),
        (
            {"buckets": DENIED.format("buckets.describe", "buckets.get")},
            OWN, "not checked: the settings of gs://runs", "buckets cp rm",
        ),
        ({"buckets": GOOD, "cp": NO_WRITE}, OWN, "refused: gcloud storage cp", "buckets cp"),
        ({"buckets": GOOD, "cp": NO_WRITE}, PODS, "not checked: whether service", "buckets cp"),
        (
            {"buckets": GOOD, "rm": DENIED.format("rm", "objects.delete")},
            OWN, "refused: gcloud storage rm gs://runs/dtrain-check-", "buckets cp rm",
        ),
    ],
)  # fmt: skip
def test_a_bucket_is_refused_only_for_confirmed_problems(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[str, str],
    writer: str,
    note: str | None,
    commands: str,
) -> None:
    def ask() -> list[str]:
        try:
            return check_bucket("gs://runs", writer)
        except EnvironmentFault as error:
            return [f"refused: {error.message}"]

    notes, found = answered(tmp_path, monkeypatch, answers, ask)
    assert found == commands.split()
    assert any(note in line for line in notes) if note else notes == []


def test_without_gcloud_and_in_other_clouds_nothing_is_reported_as_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert check_bucket("gs://runs") == [
        "not checked: whether the run may write to gs://runs: gcloud is not installed here"
    ]
    assert check_bucket("s3://runs") == ["not checked: s3://runs: only buckets of Google Cloud can be checked"]


STOP = "gs://runs/small/stop"
NO_OBJECT = "ERROR: (gcloud.storage.ls) One or more URLs matched no objects."
NO_DELETE = DENIED.format("rm", "objects.delete")
NO_LIST = DENIED.format("ls", "objects.list")


@pytest.mark.parametrize(
    ("answers", "checked", "removed"),
    [
        ({"ls": NO_OBJECT, "rm": NO_OBJECT}, [], []),
        ({}, [f"{STOP} is the stop request of an earlier launch, which `up` removes"], []),
        ({"rm": NO_DELETE}, ["refused"], ["refused"]),
        ({"ls": NO_OBJECT, "rm": NO_DELETE}, [], []),
        (
            {"ls": NO_LIST, "rm": NO_DELETE},
            [f"not checked: whether {STOP} is absent; a run that finds this stop request ends at once"],
            [f"not checked: whether {STOP} is absent; a run that finds this stop request ends at once"],
        ),
    ],
)
def test_a_stop_request_is_removed_or_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[str, str],
    checked: list[str],
    removed: list[str],
) -> None:
    for ask, notes in ((check_stop_request, checked), (remove_stop_request, removed)):
        if notes == ["refused"]:
            with pytest.raises(EnvironmentFault, match=r"and cannot be removed: .*delete access") as raised:
                answered(tmp_path, monkeypatch, answers, partial(ask, STOP))
            assert raised.value.hint.endswith(f"gcloud storage rm {STOP}")
            continue
        found, _ = answered(tmp_path, monkeypatch, answers, partial(ask, STOP))
        assert [line.startswith(note) for line, note in zip(found, notes, strict=True)] == [True] * len(notes)


def test_a_check_does_not_remove_the_stop_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(tmp_path, monkeypatch, {}, lambda: check_stop_request(STOP))[1] == ["ls", "cp", "rm"]
    (removed,) = [line for line in (tmp_path / "lines").read_text().splitlines() if " rm " in line]
    assert removed.startswith("storage rm gs://runs/dtrain-check-")


def test_removing_an_absent_object_succeeds_and_other_failures_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answered(tmp_path, monkeypatch, {"rm": NO_OBJECT}, lambda: remove_object(STOP) or [])[1] == ["rm"]
    with pytest.raises(EnvironmentFault, match=r"objects\.delete access"):
        answered(tmp_path, monkeypatch, {"rm": NO_DELETE}, lambda: remove_object(STOP) or [])


class Storage(BaseHTTPRequestHandler):
    """The part of Cloud Storage's JSON API that gcloud uses; the buckets good, soft and readonly exist."""

    kept: set[str] = set()

    def do_GET(self) -> None:
        bucket, name = self._place()
        if bucket not in ("good", "soft", "readonly"):
            self._answer(404, "The specified bucket does not exist.")
        elif name is None:
            kept = {"softDeletePolicy": {"retentionDurationSeconds": "604800"}} if bucket == "soft" else {}
            self._answer(200, {"name": bucket, "location": "EUROPE-WEST4", "storageClass": "STANDARD"} | kept)
        elif not name:
            self._answer(200, {"kind": "storage#objects"})
        elif f"{bucket}/{name}" in self.kept:
            self._answer(200, {"bucket": bucket, "name": name, "size": "7", "generation": "1"})
        else:
            self._answer(404, "No such object.")

    def do_POST(self) -> None:
        bucket, _ = self._place()
        name = json.loads(self._body())["name"]
        if bucket == "readonly":
            self._answer(403, "ada does not have storage.objects.create access to the Google Cloud Storage object.")
        else:
            assert isinstance(self.server, ThreadingHTTPServer)
            port = self.server.server_port
            self._answer(200, {}, Location=f"http://127.0.0.1:{port}/upload/storage/v1/b/{bucket}/o/{name}")

    def do_PUT(self) -> None:
        (bucket, name), body = self._place(), self._body()
        self.kept.add(f"{bucket}/{name}")
        digest = base64.b64encode(hashlib.md5(body).digest()).decode()
        found = {"kind": "storage#object", "bucket": bucket, "name": name, "size": str(len(body))}
        self._answer(200, found | {"generation": "1", "md5Hash": digest})

    def do_DELETE(self) -> None:
        bucket, name = self._place()
        self.kept.discard(f"{bucket}/{name}")
        self.send_response(204)
        self.end_headers()

    def _place(self) -> tuple[str, str | None]:
        """The bucket and the object of a request: empty for the list of objects, None for the bucket itself."""
        bucket, found, name = self.path.partition("?")[0].partition("/b/")[2].partition("/o")
        return bucket, unquote(name.lstrip("/")) if found else None

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, code: int, body: Any, **headers: str) -> None:
        text = json.dumps(body if code == 200 else {"error": {"code": code, "message": body}}).encode()
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing."""


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Storage]]:
    """The real gcloud, with this process as its Cloud Storage."""
    if not shutil.which("gcloud"):
        pytest.skip("gcloud is not installed")
    Storage.kept.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Storage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/storage/v1/"
    settings = {"API_ENDPOINT_OVERRIDES_STORAGE": url, "AUTH_ACCESS_TOKEN": "none", "CONFIG": str(tmp_path / "gcloud")}
    settings |= {"CORE_PROJECT": "p", "CORE_DISABLE_PROMPTS": "1", "CORE_DISABLE_USAGE_REPORTING": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"CLOUDSDK_{name}", value)
    yield Storage
    server.shutdown()
    server.server_close()


@pytest.mark.nightly
def test_the_real_gcloud_prints_the_expected_messages(storage: type[Storage], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[set[str]] = []
    monkeypatch.setattr(storage, "do_DELETE", _noting(storage.do_DELETE, kept))
    assert check_bucket("gs://good") == []
    assert [len(one) for one in kept] == [1]  # written, and then deleted
    assert not storage.kept
    remove_object("gs://good/small/stop")
    assert check_stop_request("gs://good/small/stop") == []
    storage.kept.add("good/small/stop")
    assert "which `up` removes" in check_stop_request("gs://good/small/stop")[0]
    assert storage.kept == {"good/small/stop"}
    assert remove_stop_request("gs://good/small/stop") == []
    assert not storage.kept
    assert "gs://soft keeps, and bills, deleted checkpoints for 7 days" in check_bucket("gs://soft")[0]
    with pytest.raises(EnvironmentFault, match="bucket gs://absent does not exist"):
        check_bucket("gs://absent")
    with pytest.raises(EnvironmentFault, match=r"does not have storage\.objects\.create access"):
        check_bucket("gs://readonly")
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN")
    (note,) = check_bucket("gs://good")
    assert note.startswith("not checked: whether the run may write to gs://good")
    assert "active account" in note


def _noting(delete: Callable[[Storage], None], kept: list[set[str]]) -> Callable[[Storage], None]:
    """The same, after recording the stored objects."""

    def call(self: Storage) -> None:
        kept.append(set(self.kept))
        delete(self)

    return call
