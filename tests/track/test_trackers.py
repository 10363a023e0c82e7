"""The outputs of a run for other programs, read back by those programs."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.recipe.load import load
from dtrain.track.custom import CustomTracker
from dtrain.track.jsonl import cut, lines, read
from dtrain.track.wandb import agent_name
from tests.conftest import Dtrain

RECIPE = """
model: {kind: mlp, sizes: [64, 16, 10]}
data: digits
optimizer: {kind: sgd, lr: 0.1}
batch: 64
steps: 10
track: {every: 2, to: [tensorboard, {kind: wandb, project: trial, mode: offline, tags: [a, b], group: g1, notes: n1}]}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped at step 6 and resumed."""
    from tests.conftest import bare_environment

    folder = tmp_path_factory.mktemp("tracked")
    (folder / "small.yaml").write_text(RECIPE)
    for steps in (6, 10):
        command = [sys.executable, "-m", "dtrain", "run", "small.yaml", f"steps={steps}"]
        subprocess.run(command, cwd=folder, env=bare_environment(), check=True, capture_output=True, timeout=200)
    return folder / "runs" / "small"


def wandb_records(folder: Path) -> list[dict[str, object]]:
    """An offline run as `wandb` itself reads it."""
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.nightly
def test_wandb_reads_the_run_back(run: Path) -> None:
    fragments = sorted((run / "wandb").glob("offline-run-*"))
    assert len(fragments) == 2
    run_id = json.loads((run / "run.json").read_text())["tracker_ids"]["wandb"]
    assert all(path.name.endswith(run_id) for path in fragments)
    text = "\n".join(json.dumps(record) for path in fragments for record in wandb_records(path))
    assert '"trial"' in text
    assert "train/loss" in text
    assert "sizes" in text
    assert all(word in text for word in ("g1", "n1", "eval/accuracy"))


@pytest.mark.slow
def test_tensorboard_reads_the_run_back(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    events = {event.step: event.value for event in found.Scalars("train/loss")}
    rows = {row["step"]: row["train/loss"] for row in read(run / "metrics.jsonl") if "train/loss" in row}
    assert events == pytest.approx(rows)
    assert sorted(events) == [2, 4, 6, 8, 10]


SAMPLES = """
import json


class Samples:
    def __init__(self, run):
        self.path = run.folder.path / "samples.json"

    def log(self, step, values):
        pass

    def samples(self, step, rows):
        self.path.write_text(json.dumps([step, rows]))
"""


@pytest.mark.nightly
def test_trackers_get_the_answers_to_questions(dtrain: Dtrain, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "own_samples.py").write_text(SAMPLES)
    (tmp_path / "q.jsonl").write_text('{"prompt": "7 | 8", "answer": "x"}\n' * 2)
    to = "[tensorboard, {kind: wandb, project: trial, mode: offline}, {kind: custom, target: own_samples:Samples}]"
    track = "track={every: 2, to: " + to + "}"
    dtrain("run", "chat-tiny", "steps=2", "optimizer.schedule=constant", "name=asked", track, "data.cache=cache",
           "evaluate={questions: [q.jsonl], tokens: 3}")  # fmt: skip
    folder = tmp_path / "runs" / "asked"
    step, rows = json.loads((folder / "samples.json").read_text())
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert step == 2
    assert [{"step": 2} | row for row in rows] == answers
    assert len(rows) == 2
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    (event,) = found.Tensors("samples/text_summary")
    assert "7 &#124; 8" in event.tensor_proto.string_val[0].decode()
    (fragment,) = (folder / "wandb").glob("offline-run-*")
    assert list(fragment.glob("files/media/table/samples_*.table.json"))
    assert "samples" in json.dumps(wandb_records(fragment))


@pytest.mark.nightly
def test_a_run_that_cannot_reach_wandb_continues_and_stores_its_metrics(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE.replace("offline", "online"))
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    done = dtrain("run", "small.yaml", seconds=200, **unreachable)
    assert done.stderr.count("Weights & Biases cannot be reached") == 1
    (kept,) = (tmp_path / "runs" / "small" / "wandb").glob("offline-run-*")
    assert "train/loss" in json.dumps(wandb_records(kept))


@pytest.mark.nightly
def test_no_key_is_written_anywhere(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    dtrain("run", "small.yaml", "steps=2", WANDB_API_KEY="canary0123456789canary0123456789canary01")
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if b"canary" in path.read_bytes()]


OWN = """
class Fails:
    def __init__(self, run, at=6, start=None):
        self.at = at
        if start is not None and run.start >= start:
            raise ValueError("no server")
    def log(self, step, values):
        if step >= self.at:
            raise ValueError(f"no room at {step}")
    def close(self):
        raise OSError("closed badly")

def nothing(run):
    return 7
"""


@pytest.mark.slow
def test_a_users_tracker_gets_every_row_once_also_after_a_resume(dtrain: Dtrain, tmp_path: Path) -> None:
    sink = "track.to=[{kind: custom, target: 'csv_tracker:Csv', args: {name: rows.csv}}]"
    shutil.copy(Path(__file__).parents[2] / "examples" / "csv_tracker.py", tmp_path)
    (tmp_path / "small.yaml").write_text(RECIPE)
    for steps in ("steps=6", "steps=10"):
        dtrain("run", "small.yaml", steps, sink, "--allow-changes")
    run = tmp_path / "runs" / "small"
    with (run / "rows.csv").open() as file:
        rows = [(int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(file)]
    logged = read(run / "metrics.jsonl")
    assert rows == [(row["step"], name, row[name]) for row in logged for name in row if name != "step"]
    assert len({step for step, *_ in rows}) == 5


@pytest.mark.slow
def test_a_tracker_that_fails_ends_neither_the_run_nor_the_other_trackers(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "small.yaml").write_text(RECIPE)
    sink = "track.to=[{kind: custom, target: 'own:Fails', args: {at: 4}}, tensorboard]"
    done = dtrain("run", "small.yaml", sink)
    assert done.stderr.count("own:Fails failed at step 4 and gets no more metrics: no room at 4") == 1
    assert "failed while it was closed: " in done.stderr
    assert [row["step"] for row in read(tmp_path / "runs" / "small" / "metrics.jsonl")][-1] == 10
    assert list((tmp_path / "runs" / "small" / "tensorboard").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("own:nothing", "returns a int without log"),
        ("own:no", "no attribute 'no'"),
        ("gone:X", "no module named 'gone'"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused(dtrain: Dtrain, tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "small.yaml").write_text(RECIPE)
    assert message in dtrain("run", "small.yaml", f"track.to=[{{kind: custom, target: '{target}'}}]", code=2).stderr


@pytest.mark.slow
def test_a_tracker_that_does_not_start_ends_a_new_run_and_not_a_resumed_one(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "small.yaml").write_text(RECIPE)
    sink = "track.to=[{kind: custom, target: 'own:Fails', args: {at: 99, start: %s}}]"
    assert "no server" in dtrain("run", "small.yaml", "name=new", sink % 0, code=2).stderr
    dtrain("run", "small.yaml", "steps=6", sink % 6)
    done = dtrain("run", "small.yaml", "--extend", "4steps", sink % 6)
    assert "own:Fails did not start, and the resumed run continues without it" in done.stderr
    assert read(tmp_path / "runs" / "small" / "metrics.jsonl")[-1]["step"] == 10


def test_the_module_of_a_tracker_is_found_beside_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.py").write_text(OWN)
    track = "track: {to: [{kind: custom, target: 'own:Fails'}]}"
    (tmp_path / "recipes" / "small.yaml").write_text(f"{RECIPE.partition('track:')[0]}{track}")
    monkeypatch.chdir(tmp_path)
    (sink,) = load(Path("recipes/small.yaml")).track.to
    assert isinstance(sink, CustomTracker)
    assert sink.folder == str(tmp_path / "recipes")


def test_each_run_of_a_wandb_agent_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agent_name("recipes/My_Net.yaml", []) == []
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "Ab3")
    assert agent_name("recipes/My_Net.yaml", ["optimizer.lr=1"]) == ["name=my-net-ab3"]
    assert agent_name("recipes/My_Net.yaml", ["name=mine"]) == []


@pytest.mark.nightly
def test_a_wandb_sweep_runs_by_its_overrides(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    dtrain("run", "small.yaml", "optimizer.lr=0.2", WANDB_SWEEP_ID="s1", WANDB_RUN_ID="ab3")
    record = json.loads((tmp_path / "runs" / "small-ab3" / "run.json").read_text())
    assert record["tracker_ids"] == {"wandb": "ab3"}
    (kept,) = (tmp_path / "runs" / "small-ab3" / "wandb").glob("offline-run-*")
    assert "s1" in json.dumps(wandb_records(kept))


def test_a_resumed_record_is_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with lines(path, 0, pytest.fail) as sink:
        for step in (1, 2, 3):
            sink.log(step, {"train/loss": step / 7})
    with path.open("a") as file:
        file.write('{"step": 4, "train/lo')
    assert [row["step"] for row in read(path)] == [1, 2, 3]
    cut(path, 2, pytest.fail)
    assert (
        path.read_text()
        == '{"step": 1, "train/loss": 0.14285714285714285}\n{"step": 2, "train/loss": 0.2857142857142857}\n'
    )


def test_damaged_lines_are_reported_and_the_file_is_kept(tmp_path: Path) -> None:
    path, warnings = tmp_path / "metrics.jsonl", []
    good = '{"step": 1, "train/loss": 0.5}\n'
    damaged = ['{"step": "2"}', '{"step": true}', '{"step": 3, "train/loss": "x"}', "[" * 100_000, "{", '{"step": -1}']
    path.write_text(good + "".join(f"{line}\n" for line in damaged))
    before = path.read_text()
    cut(path, 9, warnings.append)
    assert path.read_text() == good
    (kept,) = tmp_path.glob("metrics.jsonl.bad-*")
    assert kept.read_text() == before
    assert "6 damaged lines skipped, the first is line 2" in warnings[0]
