"""`data show`: examples as the model gets them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dtrain.core.run_dir import Folder
from dtrain.inference.seen import seen
from tests.conftest import Dtrain

REST = "optimizer: {kind: adamw, lr: 1e-3}\nbatch: 2\nsteps: 2\n"


def test_pictures_are_described_and_written(dtrain: Dtrain, tmp_path: Path) -> None:
    for name, value in (("cat", 200), ("dog", 50)):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("RGB", (20, 30), (value, 0, 0)).save(tmp_path / "pets" / name / "1.png")
    model = "model: {kind: mlp, sizes: [192, 2]}\n"
    data = f"data: {{kind: images, root: {tmp_path}/pets, size: [8, 8], test: 0.0}}\n"
    (tmp_path / "r.yaml").write_text(model + data + REST)
    shown = dtrain("data", "show", "r.yaml", "--rows", "2", "--png", "rows.png")
    assert "row 0: cat/1.png, label 0 (cat)\n  8 x 8 x 3, values 0 to 200, mean 66.67" in shown.stdout
    assert "row 1: dog/1.png, label 1 (dog)" in shown.stdout
    with Image.open(tmp_path / "rows.png") as sheet:
        pixels = np.asarray(sheet)
    assert pixels.shape == (8, 18, 3)
    assert pixels[0, 0].tolist() == [200, 0, 0] and pixels[0, 10].tolist() == [50, 0, 0]


def test_columns_of_a_table_have_their_names(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,age,town,y\n1,30,Bern,a\n2,40,Basel,b\n")
    data = "data: {kind: table, files: [t.csv], label: y, test: 0.0, scale: false}\n"
    (tmp_path / "r.yaml").write_text("model: {kind: mlp, sizes: [3, 2]}\n" + data + REST)
    shown = dtrain("data", "show", "r.yaml")
    assert "row 0: t.csv: row 1 (id 1), label 0 (a)\n  age 30\n  town=Basel 0\n  town=Bern 1\n" in shown.stdout


RECORDS = [
    {"prompt": f"{i} is ", "completion": f"{'even' if i % 3 else 'odd'} {i}", "label": i % 3 > 0} for i in range(9)
]
PAIRS = [{"prompt": f"{i} is ", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(9)]


@pytest.mark.parametrize(
    ("kind", "records", "shown"),
    [
        (
            "feedback",
            RECORDS,
            ["bad:\n0 is ⟦odd 0⟧", "bad, with another answer:\n0 is ⟦even 1⟧", "good:\n1 is ⟦even 1⟧"],
        ),
        ("preference", PAIRS, ["preferred:\n1 is ⟦good 1⟧", "rejected:\n1 is ⟦bad 1⟧"]),
    ],
)
def test_answers_are_shown_with_their_judgement(
    dtrain: Dtrain, tmp_path: Path, kind: str, records: list[dict[str, Any]], shown: list[str]
) -> None:
    """Also where a row has no document of number 0, as those of bad answers."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    model = "model: {kind: decoder, vocab: 256, width: 8, layers: 1, heads: 1, context: 32}\n"
    data = f"data: {{kind: {kind}, files: [a.jsonl], template: plain, length: 32}}\n"
    (tmp_path / "r.yaml").write_text(model + data + REST)
    (tmp_path / "base.yaml").write_text(model + "data: {kind: text, files: [a.txt], length: 32}\n" + REST)
    (tmp_path / "a.txt").write_text("0 is even 1 is odd " * 40)
    dtrain("run", "base.yaml")
    with (tmp_path / "r.yaml").open("a") as file:
        objective = {"feedback": "kto", "preference": "dpo"}[kind]
        file.write(
            f"objective: {objective}\ninit: {{run: runs/base}}\nlora: {{rank: 2, targets: [blocks.query.weight]}}\n"
        )
    found = dtrain("data", "show", "r.yaml", "--rows", "2").stdout
    assert [one for one in shown if one not in found] == []
    dtrain("run", "r.yaml")
    last = {"feedback": ", with another answer: ", "preference": "rejected: "}[kind]
    assert [last in line for line in dtrain("data", "seen", "r", "--at", "1").stdout.splitlines()] == [True, True]
    seen_run, _ = seen(Folder(tmp_path / "runs" / "r"))
    for row in range(len(seen_run.source)):  # a tokenizer may have a text for the number of empty slots
        names = [
            name for name in seen_run.source.names_of("document") if f"{name}: " in f", {seen_run.text(row, None)}"
        ]
        assert len([name for name in names if ", " not in name]) == {"feedback": 1, "preference": 2}[kind], row
    for name in (" is ", last.strip(" ,:")):  # names of documents are not searched
        found = dtrain("data", "seen", "r", "--text", name, "--json").stdout
        assert bool(json.loads(found)) == (name == " is ")


def test_tokens_without_a_tokenizer_are_numbers(dtrain: Dtrain, tmp_path: Path) -> None:
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "t.bin")
    model = "model: {kind: decoder, vocab: 64, width: 8, layers: 1, heads: 1, context: 4}\n"
    data = "data: {kind: tokens, files: [t.bin], length: 4, test: 0.5}\n"
    (tmp_path / "r.yaml").write_text(model + data + REST)
    shown = dtrain("data", "show", "r.yaml")
    assert "4 slots, 4 count in the loss" in shown.stdout and "⟦" in shown.stdout
