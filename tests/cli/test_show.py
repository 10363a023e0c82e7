"""`data show`: examples as the model gets them."""

from pathlib import Path

import numpy as np
from PIL import Image

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


def test_tokens_without_a_tokenizer_are_numbers(dtrain: Dtrain, tmp_path: Path) -> None:
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "t.bin")
    model = "model: {kind: decoder, vocab: 64, width: 8, layers: 1, heads: 1, context: 4}\n"
    data = "data: {kind: tokens, files: [t.bin], length: 4, test: 0.5}\n"
    (tmp_path / "r.yaml").write_text(model + data + REST)
    shown = dtrain("data", "show", "r.yaml")
    assert "4 slots, 4 count in the loss" in shown.stdout and "⟦" in shown.stdout
