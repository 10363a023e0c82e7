"""`data seen` names the examples that a run was trained on: those that its data was asked for."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtrain.core.errors import RecipeError
from dtrain.core.run_dir import Folder
from dtrain.inference.seen import Seen, seen
from tests.conftest import Dtrain

DATA = '''
import os
import numpy as np


class Rows:
    """Its rows are numbered; what a run asks for is appended to a file."""

    classes = 3

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return 23 if self.split == "train" else 4

    def rows(self, indices):
        if self.split == "train" and "NOTED" in os.environ:
            with open(os.environ["NOTED"], "a") as file:
                file.write(" ".join(map(str, indices)) + "\\n")
        return {"image": np.repeat(indices, 4).reshape(-1, 2, 2, 1).astype(np.float32), "label": indices % 3}
'''
RECIPE = """
model: mlp
data: {kind: custom, target: "numbered:Rows"}
optimizer: {kind: sgd, lr: 1e-3}
batch: 4
steps: 14
evaluate: {every: 0}
checkpoint: {every: 5}
"""


@pytest.fixture
def run(dtrain: Dtrain, tmp_path: Path) -> Path:
    (tmp_path / "numbered.py").write_text(DATA)
    (tmp_path / "numbered.yaml").write_text(RECIPE)
    dtrain("run", "numbered.yaml", NOTED=str(tmp_path / "noted.txt"))
    return tmp_path / "runs" / "numbered"


@pytest.mark.slow
def test_the_examples_of_each_step_are_those_that_the_run_asked_for(run: Path, dtrain: Dtrain, tmp_path: Path) -> None:
    noted = [list(map(int, line.split())) for line in (tmp_path / "noted.txt").read_text().splitlines()]
    asked = [rows for rows in noted if len(rows) == 4][-14:]  # before them, the data is checked
    for step in (1, 6, 14):  # the second epoch begins in step 6
        found = json.loads(dtrain("data", "seen", "numbered", "--at", str(step), "--json").stdout)
        assert [one["row"] for one in found] == asked[step - 1]
    assert [one["epoch"] for one in json.loads(dtrain("data", "seen", run, "--at", "6", "--json").stdout)] == [
        1,
        1,
        1,
        2,
    ]
    found = json.loads(dtrain("data", "seen", run, "--row", "7", "--row", "0", "--json").stdout)
    for one in found:
        assert one["steps"] == [number for number, rows in enumerate(asked, 1) if one["row"] in rows]
    shown = dtrain("data", "seen", run, "--row", "7")
    assert shown.stdout.startswith(f"row 7  steps {', '.join(map(str, found[0]['steps']))}  label 1")
    assert "numbered: 14 steps of 4 examples" in shown.stderr
    assert "the training data has the rows 0 to 22" in dtrain("data", "seen", run, "--row", "23", code=2).stderr
    assert "are 1 to 14" in dtrain("data", "seen", run, "--at", "15", code=2).stderr
    assert "give one of --at, --row and --text" in dtrain("data", "seen", run, code=2).stderr
    (tmp_path / "numbered.py").write_text(DATA.replace("indices % 3", "(indices + 1) % 3"))
    assert "is not what" in dtrain("data", "seen", run, "--at", "1", code=4).stderr


@pytest.mark.slow
def test_skipped_batches_and_changed_orders_count(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    del record["sha256"]  # else a change by hand is refused
    plain, _ = seen(Folder(run))
    skipped = replace(plain, skips=[(5, 3)])
    assert skipped.examples(5).tolist() == plain.examples(5).tolist()
    assert skipped.examples(6).tolist() == plain.examples(9).tolist()
    assert 8 not in skipped.steps_with(plain.examples(8)).get(int(plain.examples(8)[0]), [])
    changed = {"step": 5, "recipe": ["batch: was 8, now 4"], "length": [14, None]}
    (run / "run.json").write_text(json.dumps(record | {"changes": [changed]}))
    later, _ = seen(Folder(run))
    assert later.first == 6
    with pytest.raises(RecipeError, match="are 6 to 14"):
        later.examples(5)
    (run / "run.json").write_text(json.dumps(record | {"rollbacks": 1}))
    with pytest.raises(RecipeError, match="did not record which batches"):
        seen(Folder(run))


@pytest.mark.slow
def test_a_text_is_found_where_the_model_saw_it(dtrain: Dtrain, tmp_path: Path) -> None:
    lines = [f"number {number} is {'even' if number % 2 == 0 else 'odd'}" for number in range(40)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (tmp_path / "lines.yaml").write_text(
        "model: {kind: decoder, vocab: 256, context: 32, layers: 1, width: 16, heads: 2, hidden: 16}\n"
        "data: {kind: chat, files: [lines.jsonl], length: 32, template: plain, test: 0.1}\n"
        "optimizer: {kind: sgd, lr: 1e-3}\nbatch: 4\nsteps: 9\n"
    )
    dtrain("run", "lines.yaml")
    found = json.loads(dtrain("data", "seen", "lines", "--text", "number 17 is", "--json").stdout)
    assert len(found) == 1
    assert "number 17 is odd" in found[0]["text"]
    opened, tokenizer = seen(Folder(tmp_path / "runs" / "lines"))
    assert isinstance(opened, Seen)
    assert tokenizer
    for step in range(1, 10):
        rows = opened.source.rows(opened.examples(step))["token"]
        shown = ["number 17 is" in tokenizer.decode(row.tolist()) for row in np.asarray(rows)]
        assert any(shown) == (step in found[0]["steps"])


@pytest.mark.slow
@pytest.mark.nightly
def test_rows_of_a_mixture_are_named_with_their_source(dtrain: Dtrain, tmp_path: Path) -> None:
    for name, text in {"one": "abcdefgh " * 300, "two": "12345678 " * 200}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    sources = ", ".join(
        f"{{name: {name}, data: {{kind: text, files: {name}.txt, length: 16, test: 0.1}}}}" for name in ("one", "two")
    )
    (tmp_path / "mixed.yaml").write_text(
        f"model: {{kind: decoder, layers: 1, width: 16, heads: 2}}\ndata: {{kind: mixture, sources: [{sources}]}}\n"
        "optimizer: {kind: sgd, lr: 0.1}\nbatch: 8\nsteps: 3\n"
    )
    dtrain("run", "mixed.yaml")
    found = json.loads(dtrain("data", "seen", "mixed", "--at", "2", "--json").stdout)
    assert {one["source"] for one in found} == {"one", "two"}
    lines = dtrain("data", "seen", "mixed", "--at", "2", "--most", "9").stdout.splitlines()
    for _, source, text in (line.split("  ", 2) for line in lines):
        assert (source == "one") == ("abc" in text)
    for one in found:  # also the rows of the second source
        again = json.loads(dtrain("data", "seen", "mixed", "--row", str(one["row"]), "--json").stdout)
        assert again[0]["source"] == one["source"] and 2 in again[0]["steps"]
    assert "has the rows 0 to" in dtrain("data", "seen", "mixed", "--row", "99999", code=2).stderr


@pytest.mark.nightly
def test_tokens_without_a_tokenizer_are_shown_as_numbers(dtrain: Dtrain, tmp_path: Path) -> None:
    np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint16).tofile(tmp_path / "t.bin")
    (tmp_path / "r.yaml").write_text(
        "model: {kind: decoder, vocab: 256, context: 64, layers: 1, width: 32, heads: 2, hidden: 64}\n"
        "data: {kind: tokens, files: [t.bin], length: 64, random: true}\noptimizer: {kind: adamw, lr: 1e-3}\n"
        "batch: 8\nsteps: 4\n"
    )
    dtrain("run", "r.yaml")
    _, number, *tokens = dtrain("data", "seen", "r", "--at", "3").stdout.splitlines()[0].split()
    assert all(part.isdigit() for part in [number, *tokens[:-1]]) and len(tokens) > 10
    replayed = json.loads(dtrain("replay", "r", "--at", "3", "--json").stdout)
    assert len(replayed["examples"]) == 8
    assert "no data.tokenizer" in dtrain("data", "seen", "r", "--text", "12", code=4).stderr
