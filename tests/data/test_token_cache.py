"""Cached tokens are verified, and created again if they are damaged."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dtrain.core.errors import DataError, EnvironmentFault
from dtrain.data.text import Text


def text(tmp_path: Path) -> Text:
    (tmp_path / "a.txt").write_text("to be, or not to be, that is the question")
    return Text(files=(str(tmp_path / "a.txt"),), length=5, test=0.0, cache=str(tmp_path / "cache"), random=False)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flip, cut, empty, folder, Path.unlink])
@pytest.mark.parametrize("suffix", ["bin", "json"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, damage: Callable[[Path], None], suffix: str) -> None:
    data = text(tmp_path)
    before = data.open("train")
    rows = before.rows(np.arange(len(before)))["token"]
    (made,) = (tmp_path / "cache").glob(f"tokens-*.{suffix}")
    damage(made)
    after = data.open("train")
    assert np.array_equal(after.rows(np.arange(len(after)))["token"], rows)
    assert after.fingerprint == before.fingerprint


@pytest.mark.parametrize("what", ["file", "full folder"])
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, what: str) -> None:
    data = text(tmp_path)
    if what == "file":
        (tmp_path / "cache").write_text("a file")
    else:
        data.open("train")
        (made,) = (tmp_path / "cache").glob("tokens-*.bin")
        folder(made)
        (made / "kept").touch()
    with pytest.raises(EnvironmentFault, match=r"cannot write the token cache: .*cache") as caught:
        data.open("train")
    assert "data.cache" in caught.value.hint


def test_a_cache_that_is_replaced_or_removed_does_not_disturb_a_run(tmp_path: Path) -> None:
    source = text(tmp_path).open("train")
    rows = source.rows(np.arange(3))["token"]
    (made,) = (tmp_path / "cache").glob("tokens-*.bin")
    made.with_name("copy").write_bytes(made.read_bytes())
    made.with_name("copy").replace(made)
    assert np.array_equal(source.rows(np.arange(3))["token"], rows)
    made.unlink()
    assert np.array_equal(source.rows(np.arange(3))["token"], rows)
    assert source.changed() == ""


def test_a_cache_that_is_cut_during_a_run_ends_it(tmp_path: Path) -> None:
    source = text(tmp_path).open("train")
    (made,) = (tmp_path / "cache").glob("tokens-*.bin")
    cut(made)
    with pytest.raises(DataError, match=r"tokens-.*\.bin: had 41 bytes when it was opened, now 38"):
        source.rows(np.arange(3))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet", "a.arrow", "a.txt.gz", "a.zip", "a.npy", "a.PDF"])
def test_files_that_are_no_plain_text_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "to be"}\n' * 10)
    with pytest.raises(DataError, match="is not text") as caught:
        Text(files=(str(tmp_path / name),), length=5, cache=str(tmp_path)).open("train")
    assert caught.value.hint
