"""Rows cut from streams, and the documents in them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.data.tokens import Tokens
from dtrain.data.windows import with_documents


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 1.0])
def test_documents_are_as_a_loop_finds_them(chance: float) -> None:
    cut = (np.random.default_rng(0).random((7, 13)) >= chance).astype(np.int32)
    found = with_documents(cut[:, :-1].copy(), cut[:, 1:].copy(), 0)
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


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_rows_in_any_order_are_slices_of_their_streams(random: bool, dtype: Any, tmp_path: Path) -> None:
    draw, files = np.random.default_rng(0), {}
    for name, count in (("a", 57), ("b", 5), ("c", 10), ("d", 93)):
        files[name] = draw.integers(0, 60_000, count).astype(dtype)
        (tmp_path / f"{name}.bin").write_bytes(files[name].tobytes())
    files_of: Any = {"files": (str(tmp_path / "*.bin"),), "test_files": (str(tmp_path / "d.bin"),)}
    data = Tokens(**files_of, length=9, dtype=dtype, random=random, cache=str(tmp_path / "cache"))
    source = data.open("train")
    width = 1 if random else 9
    starts = [(tokens, start) for tokens in files.values() for start in range(0, len(tokens) - 9, width)]
    assert (source.random_starts or len(source)) == len(starts)
    indices = draw.permutation(len(starts))
    rows = source.rows(indices)
    for row, (tokens, start) in enumerate(starts[index] for index in indices):
        assert np.array_equal(rows["token"][row], tokens[start : start + 9])
        assert np.array_equal(rows["target"][row], tokens[start + 1 : start + 10])
