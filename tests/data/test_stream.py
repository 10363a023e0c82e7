"""Files of tokens: mapped when read, never pickled, and checked for changes after they were opened."""

import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.core.errors import DataError
from dtrain.data import digest_cache as known
from dtrain.data import tokens as tokens_module
from dtrain.data.batches import refuse_changed
from dtrain.data.stream import Stream, opened
from dtrain.data.tokens import Tokens

STREAM = np.arange(1000, dtype=np.uint16)


def tokens(tmp_path: Path, array: np.ndarray = STREAM, **more: Any) -> Tokens:
    path = tmp_path / "a.npy"
    np.save(path, array)
    options = {"files": (str(path),), "length": 10, "random": False, "cache": str(tmp_path / "cache")}
    return Tokens(**(options | more))


def test_a_source_pickles_without_its_tokens(tmp_path: Path) -> None:
    source = tokens(tmp_path, np.zeros(10**6, np.uint16)).open("train")
    rows = source.rows(np.arange(3))
    sent = pickle.dumps(source)
    assert len(sent) < 10_000
    assert all(np.array_equal(pickle.loads(sent).rows(np.arange(3))[name], rows[name]) for name in rows)


def test_tokens_are_a_plain_array(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", STREAM)
    assert type(opened(tmp_path / "a.npy", "uint16").tokens) is np.ndarray


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (-3, np.int64, "contains the token -3; the minimum is 0"),
        (2**31, np.uint32, "contains the token 2,147,483,648; the maximum is 2,147,483,647"),
        (2**63, np.uint64, "contains the token 9,223,372,036,854,775,808; the maximum is"),
    ],
)
def test_a_token_out_of_range_is_refused_wherever_it_is(tmp_path: Path, value: int, dtype: Any, message: str) -> None:
    array = np.zeros(100_000, dtype)
    array[80_000] = value
    with pytest.raises(DataError, match=message) as caught:
        tokens(tmp_path, array).open("train")
    assert "a.npy" in caught.value.message


def test_the_largest_token_that_fits_is_read(tmp_path: Path) -> None:
    source = tokens(tmp_path, np.full(100, 2**31 - 1, np.uint32)).open("train")
    assert source.rows(np.array([0]))["token"].tolist() == [[2**31 - 1] * 10]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"PK\3\4" + content, "cannot be read as tokens: the magic string"),
        (lambda content: content[:40], "cannot be read as tokens"),
        (lambda content: content.replace(b"'shape': (1000,)", b"'shape': ((((((("), "cannot be read as tokens"),
        (lambda content: content[:-2], "the header declares 1,000 tokens, but 999 follow"),
        (lambda content: content + b"\0\0", "the header declares 1,000 tokens, but 1,001 follow"),
        (lambda content: content + b"\0", "2,001 bytes are not a multiple of the 2 bytes of <u2"),
    ],
)
def test_a_damaged_array_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    data, path = tokens(tmp_path), tmp_path / "a.npy"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        data.open("train")
    assert str(path) in caught.value.message


def test_an_array_under_another_name_is_not_read_as_bare_numbers(tmp_path: Path) -> None:
    tokens(tmp_path)
    (tmp_path / "a.npy").rename(tmp_path / "a.bin")
    assert opened(tmp_path / "a.bin", "uint16").count == 1000


@pytest.mark.parametrize("name", ["a.jsonl", "a.bin.gz", "a.npz", "a.txt", "a.parquet"])
def test_files_of_other_formats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(STREAM.tobytes())
    with pytest.raises(DataError, match="is not a file of tokens") as caught:
        Tokens(files=(str(tmp_path / name),), length=10).open("train")
    assert caught.value.hint


def later(path: Path) -> None:
    """Advance the modification time, whose resolution may be only milliseconds."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**7))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(200)


def replace(path: Path) -> None:
    np.save(path.with_name("b.npy"), STREAM[::-1].copy())
    path.with_name("b.npy").replace(path)
    later(path)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(500)
        file.write(b"\1")
    later(path)


@pytest.mark.parametrize("change", [cut, replace, rewrite, Path.unlink])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_that_changes_during_a_run_is_named(
    tmp_path: Path, change: Callable[[Path], None], mapped: bool
) -> None:
    source = tokens(tmp_path).open("train")
    if mapped:
        source.rows(np.arange(3))
    refuse_changed(source)
    change(tmp_path / "a.npy")
    for use in (lambda: source.rows(np.arange(3)), lambda: refuse_changed(source)):
        with pytest.raises(DataError, match=r"a\.npy") as caught:
            use()
        assert "restore the original file" in caught.value.hint


def test_a_second_open_reads_no_tokens_and_a_changed_one_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, scans = tmp_path / "large.bin", []
    with path.open("wb") as file:
        file.truncate(2**26)
    data = Tokens(files=(str(path),), length=10, cache=str(tmp_path / "cache"))
    monkeypatch.setattr(known, "FRESH_NS", 0)
    scan = Stream._scan
    monkeypatch.setattr(Stream, "_scan", lambda self: scans.append(self.count) or scan(self))
    first, second = data.open("train").fingerprint, data.open("train").fingerprint
    assert first == second
    assert len(scans) == 1
    rewrite(path)
    assert data.open("train").fingerprint != first


def test_the_index_of_megatron_gives_the_dtype(tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype=np.int32) % 7
    tokens.tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match="every second value of the first 256 is 0: its tokens are wider than uint16"):
        opened(tmp_path / "a.bin", "uint16")
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([4]))
    assert np.array_equal(opened(tmp_path / "a.bin", "uint16").tokens, tokens)
    (tmp_path / "a.idx").write_bytes(b"something else")
    with pytest.raises(DataError, match="is no index of tokens by Megatron"):
        opened(tmp_path / "a.bin", "uint16")
    (tmp_path / "a.idx").unlink()
    tokens.astype(np.int64).tofile(tmp_path / "a.bin")
    for dtype in ("uint16", "uint32"):
        with pytest.raises(DataError, match=f"wider than {dtype}"):
            opened(tmp_path / "a.bin", dtype)


def test_tokens_that_gzip_compressed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(gzip.compress(np.arange(999, dtype=np.uint16).tobytes()))
    with pytest.raises(DataError, match="is compressed by gzip"):
        opened(tmp_path / "t.bin", "uint16")


def test_a_record_is_that_of_another_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inodes of a mounted bucket differ with each host and mount; sizes and times are those of the objects."""
    (path := tmp_path / "a.bin").write_bytes(bytes(2**12))
    data = Tokens(files=(str(path),), length=10, cache=str(tmp_path / "cache"))
    monkeypatch.setattr(known, "FRESH_NS", 0)
    expected = data.open("train").fingerprint
    stamp = known.file_stamp
    monkeypatch.setattr(known, "file_stamp", lambda path: [*stamp(path)[:3], 7])
    monkeypatch.setattr(Stream, "_scan", lambda _: pytest.fail("the file was read again"))
    assert data.open("train").fingerprint == expected


def test_hosts_with_one_cache_folder_share_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (np.arange(1000, dtype=np.uint16) + number).tofile(tmp_path / f"{number}.bin")
    data = Tokens(files=(str(tmp_path / "*.bin"),), length=10, test=0.0, cache=str(tmp_path / "cache"))
    expected = data.without_cache().open("train")
    monkeypatch.setattr(known, "FRESH_NS", 0)
    monkeypatch.setattr(tokens_module, "READERS", 1)
    scan, scans = Stream._scan, list[Path]()

    def scanned(stream: Stream) -> dict[str, object]:
        scans.append(stream.path)
        if len(scans) == 1:  # while the first host reads its first file, a second one reads the others
            monkeypatch.setattr(tokens_module, "sample", lambda numbers, _: [n for n in numbers if n != 2] + [2])
            assert data.open("train").fingerprint == expected.fingerprint
        return scan(stream)

    monkeypatch.setattr(Stream, "_scan", scanned)
    monkeypatch.setattr(tokens_module, "sample", lambda numbers, _: [2, *(n for n in numbers if n != 2)])
    found = data.open("train")
    assert (found.fingerprint, found.largest, found.origin) == (expected.fingerprint, expected.largest, expected.origin)
    assert len(scans) == 5  # the file that both were reading, twice


def test_the_first_file_that_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        np.save(tmp_path / f"{name}.npy", np.full(1000, -1 if name > "a" else 1, np.int32))
    monkeypatch.setattr(tokens_module, "sample", lambda numbers, _: list(numbers)[::-1])
    with pytest.raises(DataError, match=r"b\.npy: contains the token -1"):
        Tokens(files=(str(tmp_path / "*.npy"),), length=10, cache="").open("train")
