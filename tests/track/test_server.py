"""Runs in a browser while they train: what is served, to whom, and what the pages do with it."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from dtrain.core.lease import hold_lease
from dtrain.core.run_dir import Folder
from tests.browser import CHROMIUM, Browser
from tests.conftest import Dtrain

COMMAND = [sys.executable, "-m", "dtrain", "report", "--serve"]


def make(runs: Path, name: str, loss: float, steps: int = 10, state: str = "finished") -> Folder:
    place = Folder(runs / name)
    place.prepare()
    place.write_record({"name": name, "state": state, "step": steps, "steps": 20, "started": 1.0, "ended": 3.0})
    place.recipe.write_text(f"name: {name}\n")
    log(place, loss, range(1, steps + 1))
    return place


def log(place: Folder, loss: float, steps: range) -> None:
    with place.metrics.open("a") as file:
        file.writelines(json.dumps({"step": step, "train/loss": loss / step}) + "\n" for step in steps)


@dataclass
class Served:
    """A server in a process of its own."""

    process: "subprocess.Popen[str]"
    port: int
    secret: str

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.secret}/"

    def get(self, path: str, host: str = "localhost", method: str = "GET") -> tuple[int, str, http.client.HTTPMessage]:
        """Status, text and headers of a path, as it is."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers

    def page(self, name: str) -> str:
        status, text, _ = self.get(f"/{self.secret}/{name}")
        assert status == 200, text
        return text


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    for name, loss in (("good", 1.0), ("worse", 2.0), ("a&b <i>", 3.0)):
        make(tmp_path / "runs", name, loss)
    process = subprocess.Popen(COMMAND, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    line = process.stdout.readline()
    found = re.fullmatch(r"runs in runs: http://127\.0\.0\.1:(\d+)/([\w-]+)/\n", line)
    assert found, line
    yield Served(process, int(found[1]), found[2])
    process.kill()
    process.communicate()


def test_runs_are_served_with_what_is_new_of_them(served: Served, tmp_path: Path) -> None:
    text = served.page("")
    assert re.findall(r'data-column="name" data-value="(.*?)"', text) == ["a&amp;b &lt;i&gt;", "good", "worse"]
    assert "<i>" not in text.partition("<tbody>")[2].partition("</tbody>")[0]
    version = re.findall(r'data-version="(\w+)"', text)[0]
    assert served.get(f"/{served.secret}/list?version={version}")[:2] == (204, "")
    page = served.page("runs?run=" + quote("a&b <i>"))
    assert "<h1>a&amp;b &lt;i&gt;</h1>" in page
    assert "<h1>2 runs</h1>" in served.page("runs?run=good&run=worse")
    # rows that are appended arrive, and only then; a run that starts is in the list
    version, examples = (re.findall(rf'data-{name}="(\w+)"', page)[0] for name in ("version", "examples"))
    address = f"/{served.secret}/data?run={quote('a&b <i>')}&version={version}&examples={examples}"
    assert served.get(address)[0] == 204
    log(Folder(tmp_path / "runs" / "a&b <i>"), 30.0, range(11, 13))
    make(tmp_path / "runs", "late", 1.0, state="running")
    news = json.loads(served.get(address)[1])
    assert news["charts"]["steps"] == [list(range(1, 13))]
    assert news["charts"]["charts"][0]["lines"][0]["mean"][-1] == 2.5
    assert set(news["parts"]) == {"results", "differences", "times", "recipes"}  # but the pictures, which are known
    rows = json.loads(served.get(f"/{served.secret}/list?version={version}")[1])["parts"]["rows"]
    assert 'class="state-killed">killed<' in rows  # no process holds its lease
    # a run whose process dies writes nothing more
    listing = f"/{served.secret}/list?version="
    with hold_lease(Folder(tmp_path / "runs" / "late").lease, print):
        rows = json.loads(served.get(listing)[1])["parts"]["rows"]
        assert 'class="state-running">running<' in rows
    assert 'class="state-killed">killed<' in json.loads(served.get(listing)[1])["parts"]["rows"]
    # a run that is started anew under the same name, in the same file
    place = Folder(tmp_path / "runs" / "a&b <i>")
    with place.metrics.open("r+") as file:
        file.truncate(0)
    log(place, 7.0, range(1, 31))
    lines = json.loads(served.get(address)[1])["charts"]["charts"][0]["lines"]
    assert lines[0]["mean"][:2] == [7.0, 3.5]
    place.metrics.unlink()
    assert json.loads(served.get(address)[1])["charts"]["charts"] == []
    shutil.rmtree(tmp_path / "runs" / "late")
    assert served.get(f"/{served.secret}/runs?run=late")[:2] == (404, "no run 'late' in runs")
    odd = Folder(make(tmp_path / "runs", "odd", 1.0).path.rename(tmp_path / "runs" / os.fsdecode(b"bad\xff")))
    with odd.metrics.open("a") as file:
        file.write('{"step": 11, "train/\\ud800": 1.0, "train/loss": NaN}\n')
    cells = served.page("").partition("runs?run=bad%FF")[2].partition("</tr>")[0]
    assert 'data-column="result" data-value="" ' in cells  # what is not finite is sorted last
    assert "train" in served.page("runs?run=bad%FF")
    (tmp_path / "runs" / "good" / "run.json").write_text("{")
    assert "damaged" in served.page("")
    assert served.get(f"/{served.secret}/runs?run=good")[0] == 404
    assert "<h1>worse</h1>" in served.page("runs?run=worse")


def test_only_who_has_the_address_sees_the_runs(served: Served, tmp_path: Path) -> None:
    for path in ("/", "/x/", "/x/runs?run=good", "*"):
        assert served.get(path)[0] == 403, path
    assert served.get(f"/{served.secret}/", host="example.org")[0] == 403  # a name that was pointed at this address
    assert served.get(f"/{served.secret}/", host="127.0.0.1:9999")[0] == 200  # the other end of a tunnel
    shutil.copytree(tmp_path / "runs" / "good", tmp_path / "elsewhere")
    for name in ("../elsewhere", "../../etc", str(tmp_path / "elsewhere"), ".", ""):
        assert served.get(f"/{served.secret}/runs?run={quote(name)}")[0] == 404, name
    assert served.get(f"/{served.secret}/etc/passwd")[0] == 404
    assert served.get(f"/{served.secret}/", method="POST")[0] == 501
    status, text, headers = served.get(f"/{served.secret}/", method="HEAD")
    assert (status, text) == (200, "")
    assert "default-src 'none'; script-src 'nonce-" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", served.port))  # another address of this machine


def test_ctrl_c_ends_it_and_a_port_in_use_is_named(served: Served, in_process: Dtrain, tmp_path: Path) -> None:
    taken = in_process("report", "--serve", "--port", str(served.port), code=3).stderr
    assert f"port {served.port} cannot be used: Address already in use" in taken
    assert "--port" in taken
    for text in (b"GET / HTT", f"GET /{served.secret}/runs?run=x HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()):
        with socket.socket() as closed:  # a page that is closed at once, without a farewell
            closed.connect(("127.0.0.1", served.port))
            closed.sendall(text)
            closed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    (tmp_path / "runs" / "good" / "evaluation.json").write_text("[]")
    for _ in range(2):
        assert "good" in served.page("runs?run=good")
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0
    printed = served.process.communicate()[1]
    assert printed.count("evaluation.json is damaged") == 1
    assert "stopped" in printed
    assert "Traceback" not in printed


def test_options_that_do_not_fit_are_refused(tmp_path: Path, in_process: Dtrain) -> None:
    make(tmp_path / "runs", "good", 1.0)
    assert "add --serve" in in_process("report", "good", "--port", "80", code=2).stderr
    for option in (["--watch"], ["--json"], ["--html", "x.html"], ["--plot", "x.png"]):
        assert "--serve shows runs in a browser" in in_process("report", "--serve", *option, code=2).stderr
    assert "no run is named" in in_process("report", code=2).stderr
    assert "did you mean 'good'" in in_process("report", "--serve", "god", code=2).stderr
    assert "nowhere is not a folder" in in_process("report", "--serve", "--runs-dir", "nowhere", code=2).stderr


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium, which opens the pages")
@pytest.mark.nightly
def test_a_browser_sorts_filters_compares_and_follows(served: Served, tmp_path: Path) -> None:
    names = (
        "[...document.querySelectorAll('.runs tbody tr')].filter(row => !row.hidden).map(row => row.cells[1].innerText)"
    )
    with Browser(tmp_path / "browser") as browser:
        browser.open(served.address)
        browser.click("th[data-sort=name] button")
        assert browser.value(names) == ["a&b <i>", "good", "worse"]
        browser.click("th[data-sort=result] button")
        assert browser.value(names) == ["a&b <i>", "worse", "good"]
        assert browser.value("document.querySelector('th[data-sort=result]').getAttribute('aria-sort')") == "descending"
        browser.click("#filter")
        browser.text("FIN wor")
        assert browser.value(names) == ["worse"]
        assert browser.value("byId('count').textContent") == "1 of 3 runs"
        browser.value("filter.value = ''; arrange()")
        for number in (2, 3):
            browser.click(f".runs tbody tr:nth-child({number}) input")
        assert browser.value("document.activeElement.value") == "good"  # a row that is moved keeps the focus
        # what is new arrives without a reload, and the chosen runs stay chosen
        make(tmp_path / "runs", "go", 0.5)
        browser.value("document.querySelector('.runs tbody tr:nth-child(2) a').focus()")
        browser.until(f"{names}.length === 4")
        assert browser.value("document.activeElement.innerText") == "worse"
        assert browser.value(names) == ["a&b <i>", "worse", "good", "go"]
        assert browser.value("byId('compare').innerText") == "compare 2 runs"
        browser.click("#compare")
        browser.until("location.href.includes('runs?run=worse&run=good') && document.querySelector('.chart')")
        label = "document.querySelector('.plot svg').getAttribute('aria-label')"
        assert "worse train from 2 at step 1 to 0.2 at step 10" in browser.value(label)
        browser.value("charts.get('loss').range(2, 8)")
        log(Folder(tmp_path / "runs" / "worse"), 24.0, range(11, 13))
        browser.until("charts.get('loss').lines[0].steps.at(-1) === 12")
        assert browser.value("charts.get('loss').zoom") == [2, 8]
        served.process.kill()
        browser.until("byId('live').textContent.startsWith('no connection')")
        assert all("ERR_CONNECTION" in error for error in browser.errors), browser.errors
