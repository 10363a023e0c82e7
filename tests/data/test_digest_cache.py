"""Cached results of reading a file are used only for the unchanged file."""

import os
import time
from pathlib import Path

import pytest

from dtrain.core.errors import DataError
from dtrain.data import digest_cache as module
from dtrain.data.digest_cache import cached_by_file, read_sealed, write_sealed


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "FRESH_NS", 0)
    path = tmp_path / "file"
    path.write_text("one")
    return path


def read(cache: Path, *files: Path) -> tuple[list[str], list[Path]]:
    """The results for the files, and the files that were read to compute them."""
    opened: list[Path] = []

    def reader(path: Path) -> str:
        opened.append(path)
        return path.read_text()

    return cached_by_file(str(cache), "key", files, reader), opened


def test_a_file_is_read_once(tmp_path: Path, file: Path) -> None:
    assert [read(tmp_path / "cache", file) for _ in range(2)] == [(["one"], [file]), (["one"], [])]


def test_a_file_is_read_again_where_its_size_and_time_are_as_before(tmp_path: Path, file: Path) -> None:
    read(tmp_path / "cache", file)
    before = file.stat()
    time.sleep(0.02)  # times may advance in steps of milliseconds
    file.write_text("two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(tmp_path / "cache", file) == (["two"], [file])


def test_nothing_is_recorded_of_a_file_that_has_just_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRESH_NS", 10**12)
    (tmp_path / "file").write_text("one")
    assert [len(read(tmp_path / "cache", tmp_path / "file")[1]) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_record_counts_as_absent(tmp_path: Path, file: Path, damage: str) -> None:
    read(tmp_path / "cache", file)
    (record,) = (tmp_path / "cache" / "known").iterdir()
    content = record.read_bytes()
    record.write_bytes({"flip": content.replace(b"one", b"onf"), "cut": content[:-2], "empty": b""}[damage])
    assert read(tmp_path / "cache", file) == (["one"], [file])


def test_without_a_folder_to_write_to_files_are_read_each_time(tmp_path: Path, file: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert [read(tmp_path / "cache", file)[1] for _ in range(2)] == [[file], [file]]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(DataError, match="file: changed while it was read"):
        cached_by_file(str(tmp_path / "cache"), "key", [file], lambda path: path.write_text("longer"))


def test_what_is_sealed_is_read_back(tmp_path: Path) -> None:
    write_sealed(tmp_path / "x", {"a": [1, "\udcff"]})
    assert read_sealed(tmp_path / "x") == {"a": [1, "\udcff"]}
