"""Rows cut from streams, and the documents in them."""

from pathlib import Path

import numpy as np
import pytest

from dtrain.data.tokens import Tokens
from dtrain.data.windows import split


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 1.0])
def test_documents_are_as_a_loop_finds_them(chance: float) -> None:
    cut = (np.random.default_rng(0).random((7, 13)) >= chance).astype(np.int32)
    found = split(cut, 0)
    for row in range(7):
        document = position = 0
        for column in range(12):
            assert (found["document"][row, column], found["position"][row, column]) == (document, position)
            ends = cut[row, column] == 0
            assert found["target"][row, column] == (-1 if ends else cut[row, column + 1])
            document, position = (document + 1, 0) if ends else (document, position + 1)
    assert {values.dtype for values in found.values()} == {np.dtype(np.int32)}


def test_a_file_too_short_to_hold_anything_out_takes_no_window_from_another(tmp_path: Path) -> None:
    for name, count in (("a", 1000), ("b", 4), ("c", 1000)):
        (tmp_path / f"{name}.bin").write_bytes(np.arange(count, dtype=np.uint16).tobytes())
    data = Tokens(files=(str(tmp_path / "*.bin"),), length=10, cache=str(tmp_path / "cache"))
    source = data.open("test")
    assert len(source) == 2 * 9
    assert source.rows(np.arange(18))["token"][:, 0].tolist() == [*range(900, 990, 10)] * 2
