"""Runs in a browser: a table of all and a page of some, which follow the runs while they train.

It answers on the loopback interface only, to GET and HEAD only, under a random path, so that neither other machines,
nor other pages in the same browser, nor other users of this machine see the runs without the address that is printed.
Runs are looked up by their name in the list: no path of a request is opened.
"""

import json
import math
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit
from zlib import crc32

from markupsafe import Markup

from dtrain.core.errors import DtrainError, EnvironmentFault, cause
from dtrain.core.lease import in_use
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject
from dtrain.track.history import History
from dtrain.track.listing import Entry, entry
from dtrain.track.page import Contents, list_page, run_rows, runs_page
from dtrain.track.summary import KILLED, RUNNING

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
"""Names of this machine in a request; with another name a page of the internet has been pointed at this address."""
PORT, TRIED = 8765, 20
"""The first port that is tried where none is given, and how many."""
MOST = 50
"""Most runs of one page."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of every answer: only the page's own scripts run, nothing else is loaded, and no other page reads or frames it."""
Gather = Callable[[Sequence[tuple[Folder, History]]], Contents]
"""Reads what a page shows of these runs; DtrainError if a run cannot be read."""


@dataclass
class Runs:
    """The runs that are served, with what was read of them: only what changed is read again."""

    find: Callable[[], Sequence[tuple[str, Folder]]]
    """The runs with their names, which are found anew for each request: a run may start while they are served."""
    gather: Gather
    where: str
    """What the table of runs is headed with."""
    _entries: dict[str, tuple[str, Entry]] = field(default_factory=dict)
    _histories: dict[Path, History] = field(default_factory=dict)

    def list_page(self, nonce: str) -> str:
        """The page with the table of all runs."""
        news = self.list_news("")
        rows = Markup(news["parts"]["rows"])
        live = {"live": "list?", "version": news["version"], "now": str(time.time()), "most": str(MOST)}
        return list_page(rows, self.where, live, nonce)

    def list_news(self, version: str) -> JsonObject:
        """The rows of that table; empty if that version of them is the newest."""
        entries = [self._entry(name, run_dir) for name, run_dir in self.find()]
        newest = _checksum([(one.name, one.state, one.changed, one.bytes) for one in entries])
        if version == newest:
            return {}
        return {"version": newest, "parts": {"rows": run_rows((one.name, _cells(one)) for one in entries)}}

    def page(self, names: Sequence[str], nonce: str) -> str:
        """The page of the runs of these names. DtrainError if one is not in the list."""
        places = self._chosen(names)
        version, contents = _version(places), self._contents(places)
        query = urlencode([("run", name) for name in names], errors="surrogateescape")
        live = {"live": f"data?{query}", "version": version, "examples": contents.examples_version()}
        return runs_page(contents, live, nonce)

    def page_news(self, names: Sequence[str], version: str, examples: str) -> JsonObject:
        """What is new in that page since these versions of it and of its examples; empty if nothing is."""
        places = self._chosen(names)
        newest = _version(places)
        if version == newest:
            return {}
        contents = self._contents(places)
        parts, known = contents.parts(), contents.examples_version()
        parts |= {"examples": contents.examples()} if examples != known else {}
        return {"version": newest, "examples": known, "parts": parts, "charts": contents.curves()}

    def _entry(self, name: str, run_dir: Folder) -> Entry:
        """The line about a run; computed anew if a file of it has changed, or its process may have died or started."""
        stamp = _stamp(run_dir)
        known, kept = self._entries.get(name, ("", None))
        if kept is None or known != stamp or kept.state in (RUNNING, KILLED):
            kept = entry(run_dir, name, self._history(run_dir))
            self._entries[name] = stamp, kept
        return kept

    def _history(self, run_dir: Folder) -> History:
        return self._histories.setdefault(run_dir.path, History(run_dir.metrics))

    def _chosen(self, names: Sequence[str]) -> list[Folder]:
        found = dict(self.find())
        unknown = [name for name in names if name not in found]
        if unknown or not names:
            raise DtrainError(f"no run {unknown[0]!r} in {self.where}" if unknown else "no run is chosen")
        if len(names) > MOST:
            raise DtrainError(f"{len(names)} runs are chosen; a page has at most {MOST}")
        return [found[name] for name in dict.fromkeys(names)]

    def _contents(self, places: Sequence[Folder]) -> Contents:
        return self.gather([(run_dir, self._history(run_dir)) for run_dir in places])


def _cells(one: Entry) -> dict[str, tuple[str, str | float]]:
    """By column of the table of runs: the text, and the value to sort by."""
    row, values = one.row(), one.summary.values if one.summary else {}
    name = one.summary.main_metric[0] if one.summary else ""
    numbers = {
        "step": one.reached if values else None,
        "result": values["last"][name] if name else None,
        "best": one.best[1] if one.best else None,
        "changed": one.changed,
        "bytes": one.bytes,
    }
    texts = {**row, "changed": row["age"], "bytes": row["size"], "problem": row[""]}
    columns = ("name", "state", "step", "result", "best", "changed", "bytes", "problem")
    return {column: (texts[column], _sorted_by(numbers.get(column, texts[column]))) for column in columns}


def _sorted_by(value: str | float | None) -> str | float:
    """The value; empty for numbers that are not known or not finite, which come last."""
    return value if isinstance(value, str) or (value is not None and math.isfinite(value)) else ""


def _version(places: Sequence[Folder]) -> str:
    """Changes whenever the page of these runs does."""
    return _checksum([(_stamp(run_dir), in_use(run_dir.lease)) for run_dir in places])


def _stamp(run_dir: Folder) -> str:
    """Changes whenever a file of a run changes that is shown."""
    files = (run_dir.record, run_dir.metrics, run_dir.recipe, run_dir.evaluation, run_dir.samples)
    return _checksum([(file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else None for file in files])


def _checksum(values: object) -> str:
    return f"{crc32(json.dumps(values).encode()):08x}"


class Server(ThreadingHTTPServer):
    """Serves the pages of runs at `address` until it is shut down."""

    daemon_threads = True

    def __init__(self, runs: Runs, port: int) -> None:
        self.runs, self.secret, self.lock = runs, secrets.token_urlsafe(9), threading.Lock()
        super().__init__((HOST, port), Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A page that was closed in the middle of a request is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]

    @property
    def address(self) -> str:
        """What is opened in a browser of this machine."""
        return f"http://{HOST}:{self.server_port}/{self.secret}/"


def open_server(runs: Runs, port: int | None) -> Server:
    """A server at that port, or at the first free one from PORT on. EnvironmentFault if it is not free."""
    failure: OSError | None = None
    for number in [port] if port else range(PORT, PORT + TRIED):
        try:
            return Server(runs, number)
        except OSError as error:
            failure = error
    which = f"port {port}" if port else f"none of the ports {PORT} to {PORT + TRIED - 1}"
    hint = "choose another with --port, or none: the first free one is taken" if port else "choose one with --port"
    verb = "cannot" if port else "can"
    raise EnvironmentFault(f"{which} {verb} be used: {cause(failure) if failure else ''}", hint) from failure


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dtrain", ""
    timeout = 60
    """Seconds until a connection without a request is closed."""

    def do_GET(self) -> None:
        """Answer with a page, with what is new of it, or with an error of one line."""
        try:
            self._answer()
        except DtrainError as error:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", error.message.splitlines()[0])
        except ConnectionError:
            raise  # which `handle_error` knows
        except Exception as error:  # the other pages are still served
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{type(error).__name__}: {cause(error)}")

    do_HEAD = do_GET

    def _answer(self) -> None:
        address = urlsplit(self.path)
        secret, _, page = address.path.removeprefix("/").partition("/")
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        if host not in NAMES or not secrets.compare_digest(secret.encode(), self.server.secret.encode()):
            text = "open the address that `dtrain report --serve` has printed"
            self._send(HTTPStatus.FORBIDDEN, "text/plain", text)
            return
        query, runs = parse_qs(address.query, errors="surrogateescape"), self.server.runs
        names, nonce = query.get("run", []), secrets.token_urlsafe(12)
        version, examples = (query.get(key, [""])[0] for key in ("version", "examples"))
        with self.server.lock:  # what was read of a run is added to by one request at a time
            match page:
                case "":
                    found = runs.list_page(nonce)
                case "runs":
                    found = runs.page(names, nonce)
                case "list":
                    found = runs.list_news(version)
                case "data":
                    found = runs.page_news(names, version, examples)
                case _:
                    raise DtrainError("no such page")
        if isinstance(found, str):
            self._send(HTTPStatus.OK, "text/html", found, nonce)
        elif found:
            self._send(HTTPStatus.OK, "application/json", json.dumps(found, separators=(",", ":")))
        else:
            self._send(HTTPStatus.NO_CONTENT, "", "")

    def _send(self, status: HTTPStatus, kind: str, text: str, nonce: str = "") -> None:
        body = text.encode(errors="replace")  # names of folders may be no Unicode
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value.format(nonce=nonce))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class names it so)
        """Requests are not printed."""
