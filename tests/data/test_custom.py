"""Data of users: rows by index, checked before the first step."""

import re
from pathlib import Path

import numpy as np
import pytest

from dtrain.core.errors import DtrainError
from dtrain.data.custom import CustomData
from dtrain.data.source import Source
from tests.conftest import Dtrain

TARGET = "tests.data.user_rows"


def opened(name: str) -> Source:
    return CustomData(target=f"{TARGET}:{name}").open("train")


def test_rows_come_in_types_that_jax_uses() -> None:
    source = opened("Good")
    rows = source.rows(np.array([3, 1, 3]))
    assert {name: (values.shape, str(values.dtype)) for name, values in rows.items()} == {
        "image": ((3, 8, 8, 1), "float32"),
        "label": ((3,), "int32"),
    }
    np.testing.assert_array_equal(rows["image"][0], rows["image"][2])
    assert source.example["label"].values == 10
    assert len(source) == 50


def test_the_fingerprint_is_of_the_content_or_the_users_own() -> None:
    train, test = (CustomData(target=f"{TARGET}:Good").open(split) for split in ("train", "test"))
    assert train.fingerprint == opened("Good").fingerprint != test.fingerprint
    assert opened("Stated").fingerprint == "custom:v1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Random", "called twice or in the other order, gives other values of 'image'"),
        ("ByPlace", "called twice or in the other order, gives other values of 'image'"),
        ("Ragged", "'image' has rows of different shapes"),
        ("Short", "'image' is float64[1, 8, 8, 1] for 2 rows"),
        ("Text", "'name' is <U1[2] for 2 rows"),
        ("Unstated", "it has 'label', but no classes"),
        ("Beyond", "0 to 2 are allowed"),
        ("Wide", "'id' has values that do not fit into int32"),
        ("Empty", "there are no rows"),
        ("Weighted", "'weight' is a name that dtrain uses"),
        ("Broken", "user_rows.py:"),
        ("Bare", "the object lacks __len__ and rows"),
        ("Nothing", "has no attribute 'Nothing'"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(DtrainError, match=re.escape(message)):
        opened(name).rows(np.arange(50))


def test_a_row_that_is_not_finite_is_named() -> None:
    with pytest.raises(DtrainError, match="row 7 of 'image' is NaN or infinite"):
        _ = opened("NaN").fingerprint


ROWS = """
import numpy as np
class Rows:
    classes = 2
    def __init__(self, split, shift=0.0):
        draw = np.random.default_rng(0)
        self.x = draw.normal(size=(64, 4, 4, 1)) + shift
        self.y = (self.x.mean((1, 2, 3)) > shift).astype(np.int64)
    def __len__(self): return len(self.y)
    def rows(self, indices): return {"image": self.x[indices], "label": self.y[indices]}
"""
RECIPE = """
model: {kind: mlp, sizes: [16, 8, 2]}
data: {kind: custom, target: "my_rows:Rows"}
optimizer: {kind: sgd, lr: 0.1}
batch: 16
steps: 6
"""


@pytest.mark.slow
def test_a_run_on_it_resumes_and_refuses_other_rows(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "my_rows.py").write_text(ROWS)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    dtrain("run", "mine.yaml", "--devices", "2")
    assert "resumed from step 6" in dtrain("run", "mine.yaml", "steps=9", "--devices", "2").stderr
    (tmp_path / "my_rows.py").write_text(ROWS.replace("default_rng(0)", "default_rng(1)"))
    refused = dtrain("run", "mine.yaml", "steps=12", code=4)
    assert "data" in refused.stderr


def test_no_verb_runs_its_code_unasked(in_process: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "my_rows.py").write_text("open('ran', 'w').close()")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    checked = in_process("check", "mine.yaml")
    assert "not checked: the data, whose module is imported only when the run starts" in checked.stderr
    refused = in_process("plan", "mine.yaml", "--on", "v5e-4", "--quick", code=2)
    assert "my_rows:Rows: custom code, which this command must run" in refused.stderr
    assert not (tmp_path / "ran").exists()
