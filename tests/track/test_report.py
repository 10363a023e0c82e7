"""Reports of several runs, their picture and their page, which a headless browser opens."""

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from dtrain.core.run_dir import Folder
from tests.browser import CHROMIUM, Browser
from tests.conftest import Dtrain

ENV = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


def make(runs: Path, name: str, lr: float, steps: int = 60) -> Folder:
    place = Folder(runs / name)
    place.prepare()
    place.write_record({
        "name": name, "state": "finished", "step": steps, "steps": steps, "higher_is_better": {"accuracy": True},
        "units": {"accuracy": "%"}, "seconds": {"compile": 1.0, "device": 2.0}, "started": 10.0, "ended": 13.0,
        "topology": {"device": "cpu", "devices": 4, "mesh": {"data": 4, "fsdp": 1}},
    })  # fmt: skip
    place.recipe.write_text(f"name: {name}\noptimizer: {{kind: sgd, lr: {lr}}}\nnote: </pre><script>x</script>\n")
    rows: list[dict[str, float]] = [
        {"step": n, "train/loss": lr / n, "train/lr": lr, "time/step_ms": 5.0, "rate/examples_per_s": 800.0}
        for n in range(1, steps + 1)
    ]
    rows += [
        {"step": 30, "eval/loss": 2 * lr, "eval/accuracy": 0.5},
        {"step": 60, "eval/loss": lr, "eval/accuracy": lr},
    ]
    place.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, lr in (("lr-1", 0.1), ("lr-2", 0.2)):
        make(tmp_path / "runs", name, lr)
    return tmp_path / "runs"


def test_several_runs_are_a_table_with_the_best_marked_and_the_recipes_compared(runs: Path, in_process: Dtrain) -> None:
    shown = in_process("report", "lr-*").stdout
    assert re.search(r"^\s+lr-1\s+lr-2$", shown, re.MULTILINE)
    assert re.search(r"^eval/loss\s+0\.1\*\s+0\.2$", shown, re.MULTILINE)
    assert re.search(r"^eval/accuracy\s+10\.00%\s+20\.00%\*$", shown, re.MULTILINE)
    assert re.search(r"^best eval/accuracy\s+50\.00%\s+50\.00%$", shown, re.MULTILINE)
    assert re.search(r"^optimizer\.lr\s+0\.1\s+0\.2$", shown, re.MULTILINE)
    assert "note" not in shown
    assert "4 cpu (data 4)" in shown
    assert [run["name"] for run in json.loads(in_process("report", "lr-*", "--json").stdout)] == ["lr-1", "lr-2"]


def test_broken_runs_are_named_and_the_others_shown(runs: Path, in_process: Dtrain) -> None:
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{")
    done = in_process("report", "runs")
    assert "left out: runs/broken/run.json" in done.stderr
    assert "lr-2" in done.stdout
    in_process("report", "broken", code=3)


def test_ls_lists_every_run_and_what_is_wrong_with_it(runs: Path, in_process: Dtrain) -> None:
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{")
    (runs / "new").mkdir()
    (runs / "new" / "recipe.yaml").write_text("")
    (runs / "notes").mkdir()
    killed = make(runs, "killed", 0.3)
    killed.write_record(killed.read_record() | {"state": "running"})
    rows = {row["name"]: row for row in json.loads(in_process("ls", "--json").stdout)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "lr-1": "finished", "lr-2": "finished", "broken": "damaged", "new": "not started", "killed": "killed",
    }  # fmt: skip
    assert "run.json" in rows["broken"]["problem"]
    shown = in_process("ls").stdout
    assert re.search(
        r"^lr-1 +finished +60/60 +\d+ s +\d\.\d KiB +accuracy 10\.00% +accuracy 50\.00% at 30$", shown, re.M
    )
    assert "no runs in empty" in in_process("ls", "runs/notes").stderr.replace("runs/notes", "empty")
    in_process("ls", "nowhere", code=2)


@pytest.mark.slow
def test_the_picture_shows_curves(runs: Path, in_process: Dtrain, tmp_path: Path) -> None:
    in_process("report", "lr-1", "lr-2", "--plot", "both.png")
    with Image.open(tmp_path / "both.png") as picture:
        assert picture.size[0] > 1000
        assert len(set(picture.convert("RGB").get_flattened_data())) > 100
    assert "mkdir -p none" in in_process("report", "lr-1", "--plot", "none/x.png", code=3).stderr
    assert "mkdir -p none" in in_process("report", "lr-1", "--html", "none/x.html", code=3).stderr
    assert "name a .png" in in_process("report", "lr-1", "--plot", "x.doc", code=2).stderr


@pytest.mark.parametrize(
    "damaged",
    [
        "[]",
        '{"split": "test"}',
        '{"split": "test", "step": 3, "confusion": [[1]]}',
        '{"split": "test", "step": 3, "classes": ["a"], "confusion": [["x"]]}',
        '{"split": "test", "step": 3, "mistakes": [1]}',
        '{"split": "test", "step": 3, "mistakes": [{"label": "a"}]}',
    ],
)
def test_a_damaged_evaluation_is_left_out_of_the_page(runs: Path, in_process: Dtrain, damaged: str) -> None:
    (runs / "lr-1" / "evaluation.json").write_text(damaged)
    assert "evaluation.json is damaged" in in_process("report", "lr-1", "--html", "page.html").stderr


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "browser") as found:
        yield found
        assert not found.errors


LABEL = "document.querySelector('.plot svg').getAttribute('aria-label')"
TIP = "document.querySelector('.plot .tip').innerText"
SPOKEN = "document.querySelector('.chart [role=status]').textContent"


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium, which opens the page")
@pytest.mark.nightly
def test_a_browser_draws_the_page_without_a_network(
    runs: Path, in_process: Dtrain, tmp_path: Path, browser: Browser
) -> None:
    (runs / "lr-1" / "evaluation.json").write_text(
        json.dumps({"split": "test", "step": 60, "classes": ["a", "b"], "confusion": [[7, 1], [0, 9]]})
    )
    (runs / "lr-1" / "samples").mkdir()
    for step in (500, 1000):
        Image.new("RGB", (12, 8), "red").save(runs / "lr-1" / "samples" / f"{step:08}-digit.png")
    in_process("report", "lr-*", "--html", "page.html")
    text = (tmp_path / "page.html").read_text()
    assert len(text) < 100_000
    assert "<script>x</script>" not in text  # the recipe's text is escaped
    assert not re.search(r"(src|href)=.?https?://", text)
    browser.open((tmp_path / "page.html").as_uri())
    titles = browser.value("[...document.querySelectorAll('.chart figcaption b')].map(one => one.textContent)")
    assert titles == ["loss", "accuracy (%)", "learning rate", "time of a step (ms)", "examples per second"]
    # train/loss is 0.1 / step, evaluations are a line of their own; the accuracy is in per cent
    assert "lr-1 train from 0.1 at step 1 to 0.0016667 at step 60" in browser.value(LABEL)
    assert "lr-1 eval from 0.2 at step 30 to 0.1 at step 60" in browser.value(LABEL)
    labels = browser.value("[...document.querySelectorAll('.plot svg')].map(one => one.getAttribute('aria-label'))")
    assert "lr-2 eval from 50 at step 30 to 20 at step 60" in labels[1]
    # a line that is smoothed says so; the mean of the first two points has the weights 0.9 and 1
    assert browser.value("document.querySelector('.chart figcaption span').textContent").startswith("smoothed 0.90")
    values = browser.value("charts.get('loss').values(charts.get('loss').lines[0])")
    assert values[:2] == pytest.approx([0.1, (0.9 * 0.1 + 0.05) / 1.9])
    browser.value("byId('smoothing').value = 0; byId('smoothing').dispatchEvent(new Event('input'))")
    assert browser.value("document.querySelector('.chart figcaption span').textContent") == "as logged"
    texts = "[...document.querySelector('.plot svg').querySelectorAll('text[text-anchor=end]')]"
    assert browser.value(f"{texts}.map(one => one.textContent)") == ["0", "0.1", "0.2", "0.3", "0.4"]
    browser.click("#log")
    assert browser.value(f"{texts}.map(one => one.textContent)") == [
        "0.002",
        "0.005",
        "0.01",
        "0.02",
        "0.05",
        "0.1",
        "0.2",
    ]
    for values, shown in {
        (0.603, 0.9, True): ["0.7", "0.8", "0.9"],
        (2.1, 4.7, True): ["3", "4"],
        (1e-5, 10, True): ["1e-5", "0.001", "0.1", "10"],
        (1000, 1000.1, False): ["1,000", "1,000.02", "1,000.04", "1,000.06", "1,000.08", "1,000.1"],
        (0, 3_000_000, False): ["0", "1M", "2M", "3M"],
        (0, 4e-6, False): ["0", "1e-6", "2e-6", "3e-6", "4e-6"],
        (2.0**60, 2.0**60 + 1, False): None,
    }.items():
        low, high, log = values
        found = browser.value(f"labels(ticks({low}, {high}, {json.dumps(log)}, 5))")
        assert shown is None or found[: len(shown)] == shown, (values, found)
    # the slider of samples
    images = "[...document.querySelectorAll('.samples img')].filter(one => !one.hidden).map(one => one.alt)"
    assert browser.value(images) == ["digit at step 1,000"]
    browser.value("document.querySelector('.samples input').focus()")
    browser.key("Home")
    browser.value("document.querySelector('.samples input').value = 0")
    browser.value("document.querySelector('.samples input').dispatchEvent(new Event('input'))")
    assert browser.value(images) == ["digit at step 500"]
    assert browser.value("document.querySelector('.matrix tbody tr').innerText.split(/\\s+/).filter(Boolean)") == list(
        "a71"
    )
    assert "Confusion matrix of lr-1, held-out examples, step 60" in browser.value("document.body.innerText")
    assert "optimizer.lr" in browser.value("document.body.innerText")


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium, which opens the page")
@pytest.mark.nightly
def test_long_and_odd_curves_are_drawn_whole(tmp_path: Path, in_process: Dtrain, browser: Browser) -> None:
    place = make(tmp_path / "runs", "long", 1.0, 9000)
    with place.metrics.open("a") as file:
        for step in range(9001, 9041):
            values = {"train/loss": 100.0 if step == 9020 else 1.0} | ({"eval/loss": 1.0} if step % 2 else {})
            file.write(json.dumps({"step": step, **values, "train/below": -1.0, "train/huge": 1e308}) + "\n")
    in_process("report", "long", "--html", "page.html")
    browser.open((tmp_path / "page.html").as_uri())
    note = "[...document.querySelectorAll('.chart')].map(one => one.querySelector('figcaption span').textContent)"
    assert browser.value(note)[0] == "smoothed 0.90, faint: means of up to 8 rows"
    assert browser.value("charts.get('loss').extent().high") > 100  # the band with the spike is within the chart
    browser.value("charts.get('loss').point(9024)")
    assert "to 100" in browser.value(TIP)
    browser.click("#log")
    titles = browser.value("[...charts.keys()]")
    assert browser.value(note)[titles.index("below")].endswith("linear: no value is above 0")
    browser.value("document.querySelector('.chart details').open = true")
    browser.until("document.querySelector('.chart table')")
    cells = "[...document.querySelectorAll('.chart tbody tr')].filter(row => row.cells[2].innerText)"
    assert browser.value(f"{cells}.length") == 22  # every evaluation
    assert "means of up to 8 rows" in browser.value("document.querySelector('.chart caption').textContent")
    browser.value("charts.get('loss').range(-1000, 1e6)")
    assert browser.value("charts.get('loss').zoom") is None  # so that what is new is seen
    browser.theme("dark")
    browser.value("byId('theme').value = 'dark'; byId('theme').dispatchEvent(new Event('change'))")
    browser.send("Emulation.setEmulatedMedia", media="print")
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium, which opens the page")
@pytest.mark.nightly
def test_the_page_is_used_with_mouse_keyboard_and_screen_reader(
    runs: Path, in_process: Dtrain, tmp_path: Path, browser: Browser
) -> None:
    in_process("report", "lr-1", "--html", "page.html")
    browser.open((tmp_path / "page.html").as_uri())
    left, top, width, height = browser.place(".plot svg")
    browser.mouse("Moved", left + width - 14, top + height / 2)
    assert browser.value(TIP).split("\n")[0] == "step 60"
    assert "eval 0.1" in browser.value(TIP)
    browser.mouse("Moved", left + width / 2, top + height / 2)
    browser.mouse("Pressed", left + width / 2, top + height / 2)
    browser.mouse("Moved", left + width - 20, top + height / 2)
    browser.mouse("Released", left + width - 20, top + height / 2)
    first, last = browser.value("charts.get('loss').zoom")
    assert 25 < first < 32
    assert 56 < last < 60
    for clicks in (1, 2):
        for kind in ("Pressed", "Released"):
            browser.mouse(kind, left + width / 2, top + height / 2, clicks)
    assert browser.value("charts.get('loss').zoom") is None
    browser.value("document.querySelector('.plot').focus()")
    browser.key("End")
    assert browser.value(SPOKEN).startswith("step 60, train ")
    browser.key("ArrowLeft")
    assert browser.value(SPOKEN).startswith("step 59, train ")
    assert "eval 0.2 at 30" in browser.value(SPOKEN)
    browser.key("+")
    assert "steps 44 to 60" in browser.value(LABEL)
    browser.key("Escape")
    assert "steps 1 to 60" in browser.value(LABEL)
    found = browser.roles()
    assert ("button", "eval") in found
    assert any(role == "image" and name.startswith("loss, steps 1 to 60: train from ") for role, name in found)
    assert any(role == "application" and "Arrow keys read the values" in name for role, name in found)
    assert {("columnheader", "section"), ("rowheader", "compile")} <= set(found)
    browser.click(".legend button")
    assert browser.value("document.querySelector('.legend button').getAttribute('aria-pressed')") == "false"
    assert "train" not in browser.value(LABEL)
    browser.click(".chart summary")
    browser.until("document.querySelectorAll('.chart tbody tr').length === 60")
    colour = "getComputedStyle(document.body).backgroundColor"
    browser.theme("dark")
    dark = browser.value(colour)
    browser.value("byId('theme').value = 'light'; byId('theme').dispatchEvent(new Event('change'))")
    assert (dark, browser.value(colour)) == ("rgb(21, 24, 28)", "rgb(255, 255, 255)")


def test_a_narrow_terminal_shows_the_results(runs: Path) -> None:
    """Sizes and ages are left out before results are cut."""

    def shown(columns: int) -> list[str]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        process = subprocess.Popen([sys.executable, "-m", "dtrain", "ls"], cwd=runs.parent, stdout=theirs, env=ENV)
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while block := os.read(ours, 4096):
                text += block
        os.close(ours)
        assert process.wait(60) == 0
        return [line for line in text.decode().splitlines() if line.startswith("lr-1")]

    assert re.fullmatch(r"lr-1  finished  60/60 +\d+ s +accuracy 10\.00%  accuracy 50\.00% at 30", shown(70)[0])
    assert shown(40) == ["lr-1  finished  accuracy 10.00%"]


def test_watch_follows_one_run_until_it_ends(runs: Path, in_process: Dtrain) -> None:
    assert "lr-1: finished with accuracy 10.00%" in in_process("report", "lr-1", "--watch").stdout
    assert "follows one run" in in_process("report", "lr-1", "lr-2", "--watch", code=2).stderr
