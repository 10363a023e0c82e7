"""Reports of several runs, their picture and their page, which a headless browser opens."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from dtrain.core.run_dir import Folder
from tests.conftest import Dtrain

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --virtual-time-budget=20000 --window-size=1400,1000"
)
PROBE = """<script>
const about = {};
const plot = document.querySelectorAll('.charts .plotly-graph-div')[0];
const trace = plot.data.findIndex(one => one.meta === 'smoothed');
const values = share => {
  const slider = document.getElementById('smoothing');
  slider.value = share; slider.dispatchEvent(new Event('input'));
  return [...plot.data[trace].y];
};
about.drawn = document.querySelectorAll('.main-svg').length;
about.raw = values(0).slice(0, 3); about.smooth = values(0.9).slice(0, 3);
document.getElementById('log').click(); about.axis = plot.layout.yaxis.type;
about.wide = [...document.querySelectorAll('.charts .svg-container')].every(
  one => one.getBoundingClientRect().width >= 0.98 * one.closest('.charts > div').getBoundingClientRect().width);
const box = document.querySelector('.samples'), images = [...box.querySelectorAll('img')];
const visible = () => [images.filter(one => !one.hidden).map(one => one.alt), box.querySelector('span').textContent];
about.samples = [visible()];
box.querySelector('input').value = 0; box.querySelector('input').dispatchEvent(new Event('input'));
about.samples.push(visible(), images[0].naturalWidth);
document.title = 'probe ' + JSON.stringify(about);
</script>"""


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


def opened(page: Path) -> str:
    """The page's DOM after its scripts have run."""
    assert CHROMIUM
    command = [CHROMIUM, *QUIET.split(), f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout


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


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium, which opens the page")
@pytest.mark.nightly
def test_a_browser_draws_the_page_without_a_network(runs: Path, in_process: Dtrain, tmp_path: Path) -> None:
    (runs / "lr-1" / "evaluation.json").write_text(
        json.dumps({"split": "test", "step": 60, "classes": ["a", "b"], "confusion": [[7, 1], [0, 9]]})
    )
    (runs / "lr-1" / "samples").mkdir()
    for step in (500, 1000):
        Image.new("RGB", (12, 8), "red").save(runs / "lr-1" / "samples" / f"{step:08}-digit.png")
    in_process("report", "lr-*", "--html", "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<script>x</script>" not in text  # the recipe's text is escaped
    script = max(re.findall(r"<script>.*?</script>", text, re.DOTALL), key=len)
    assert not re.search(r"(src|href)=.https?://", text.replace(script, ""))
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{PROBE}</body>"))
    dom = opened(tmp_path / "page.html")
    found = re.search(r"<title>probe (.*?)</title>", dom)
    assert found, "the page's scripts failed"
    about = json.loads(found[1])
    assert about["raw"] == pytest.approx([0.1, 0.05, 0.1 / 3])
    # the mean of the first two points with weights 0.9 and 1
    assert about["smooth"][:2] == pytest.approx([0.1, (0.9 * 0.1 + 0.05) / 1.9])
    assert (about["axis"], about["wide"]) == ("log", True)
    assert about["drawn"] >= 6
    assert about["samples"] == [[["digit at step 1,000"], "1,000"], [["digit at step 500"], "500"], 12]
    assert "Confusion matrix of lr-1, test split, step 60" in dom
    assert "optimizer.lr" in dom


def test_watch_follows_one_run_until_it_ends(runs: Path, in_process: Dtrain) -> None:
    assert "lr-1: finished with accuracy 10.00%" in in_process("report", "lr-1", "--watch").stdout
    assert "follows one run" in in_process("report", "lr-1", "lr-2", "--watch", code=2).stderr
