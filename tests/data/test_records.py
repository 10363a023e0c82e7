"""Records of every format: what one format gives, all give; damaged files are named with the place of the damage."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest

from dtrain.core.errors import DataError
from dtrain.data.record import UNREAD, Limits
from dtrain.data.records import SUFFIXES, record_files, records

ROWS = [{"prompt": f"p{i}", "response": "ü" * (i + 1)} for i in range(7)]


def tar_of(path: Path, members: dict[str, bytes], mode: Any = "w") -> None:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write(folder: Path, name: str) -> Path:
    path, suffix = folder / name, name.partition(".")[2]
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if suffix in ("jsonl", "ndjson"):
        path.write_text(lines)
    elif suffix == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif suffix == "json":
        path.write_text(json.dumps(ROWS))
    elif suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif suffix in ("arrow", "feather"):
        table = pyarrow.Table.from_pylist(ROWS)
        make = pyarrow.ipc.new_stream if suffix == "arrow" else pyarrow.ipc.new_file
        with make(str(path), table.schema) as writer:
            writer.write_table(table)
    elif suffix in ("tar", "tar.gz"):
        members = {f"a.b/{i:03}.json": json.dumps(row).encode() for i, row in enumerate(ROWS)}
        pictures = {f"a.b/{i:03}.jpg": b"\xff\xd8" for i in range(len(ROWS))}
        mixed = dict(sorted((members | pictures).items()))
        tar_of(path, mixed, "w:gz" if suffix == "tar.gz" else "w")
    else:
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(path), "group_size:2")
        for row in ROWS:
            writer.write(json.dumps(row).encode())
        writer.close()
    return path


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".jsonl.gz", ".tar.gz"])
def test_every_format_gives_the_same_records(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, f"rows{suffix}")
    assert record_files((str(path),)) == [path]
    found = list(records(path))
    assert [fields for _, fields in found] == ROWS
    assert len({where for where, _ in found}) == len(ROWS)
    assert all(where.startswith(str(path)) for where, _ in found)


def test_members_of_one_name_are_one_record(tmp_path: Path) -> None:
    path = tmp_path / "w.tar"
    tar_of(path, {"x/1.txt": b"one", "x/1.json": b'{"id": 1}', "x/1.cls": b"3", "y/1.txt": b"two", "y/2.mp3": b"\0"})
    assert list(records(path)) == [(f"{path}: x/1", {"text": "one", "id": 1}), (f"{path}: y/1", {"text": "two"})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tar", b"nothing of the kind", "a.tar: cannot be read: truncated header"),
        ("a.array_record", b"nothing of the kind", "cannot be read|is not JSON"),
        ("a.parquet", b"nothing", "a.parquet: cannot be read: Parquet"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl:2: is not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: is list, not an object"),
        ("a.json", b'{"a": 1}', "is not a list of objects"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(records(tmp_path / name))


def arrow_of(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow.feather.write_feather(pyarrow.table(columns), path, compression="uncompressed")
    return path


def test_bytes_that_make_libraries_fail_in_other_ways_are_data_errors(tmp_path: Path) -> None:
    """Each of these once ended as a bug in dtrain: deep nesting, half a character, damaged streams, no UTF-8."""
    packed = bytearray(gzip.compress(b'{"text": "hello"}\n' * 500))
    packed[40:60] = b"x" * 20
    cases = {
        "deep.jsonl": (b"[" * 200_000, r"deep\.jsonl:1: is not JSON"),
        "half.jsonl": (b'{"text": "ok"}\n{"text": "a\\ud83d"}\n', r"half\.jsonl:2: has half of a character"),
        "half.json": (b'[{"text": "a\\ud83d"}]', r"half\.json: object 1: has half of a character"),
        "latin.jsonl": (b'{"text": "ok"}\n{"text": "caf\xe9"}\n', r"latin\.jsonl:2: is not UTF-8"),
        "damaged.jsonl.gz": (bytes(packed), r"damaged\.jsonl\.gz:\d+: (cannot be read|is not)"),
        "digits.jsonl": (b'{"text": ' + b"9" * 10_000 + b"}", r"digits\.jsonl:1: is not JSON"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            list(records(tmp_path / name))
    whole = b'{"text": "\\ud83d\\ude42"}\n'
    (tmp_path / "whole.jsonl").write_bytes(b"\xef\xbb\xbf" + whole)
    assert next(iter(records(tmp_path / "whole.jsonl")))[1] == {"text": "🙂"}


def test_columns_that_no_conversation_has_are_not_read_but_named(tmp_path: Path) -> None:
    far = pyarrow.array([2**62], pyarrow.timestamp("ms"))  # no date of Python's
    path = arrow_of(tmp_path / "a.feather", {"text": ["hi"], "at": far, "raw": [b"\xff"]})
    pyarrow.parquet.write_table(pyarrow.table({"text": ["hi"], "at": far}), tmp_path / "a.parquet")
    assert [fields for _, fields in records(path)] == [{"text": "hi", "at": UNREAD, "raw": UNREAD}]
    assert [fields for _, fields in records(tmp_path / "a.parquet")] == [{"text": "hi", "at": UNREAD}]


@pytest.mark.slow
def test_a_small_file_does_not_unpack_to_more_than_its_limits(tmp_path: Path) -> None:
    most = Limits(record_mib=1, file_mib=2)
    one = b'{"text": "' + b"a" * 2**21 + b'"}\n'
    many = b'{"text": "hello"}\n' * 200_000
    (tmp_path / "one.jsonl.gz").write_bytes(gzip.compress(one))
    (tmp_path / "many.jsonl.gz").write_bytes(gzip.compress(many))
    (tmp_path / "all.json.gz").write_bytes(gzip.compress(b"[" + b" " * 3 * 2**20 + b"]"))
    tar_of(tmp_path / "member.tar", {"a.txt": b"a" * 2**21})
    tar_of(tmp_path / "header.tar.gz", {"a" * 2**21: b""}, "w:gz")
    arrow_of(tmp_path / "one.arrow", {"text": ["b", "a" * 2**21]})
    (tmp_path / "one.json").write_bytes(b'[{"text": "b"}, {"text": "' + b"a" * 2**22 + b'"}]')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 2**19] * 5}), tmp_path / "many.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 2**21]}), tmp_path / "one.parquet")
    for name, message in {
        "one.jsonl.gz": r"one\.jsonl\.gz:1: has more than 1,048,576 bytes",
        "many.jsonl.gz": r"many\.jsonl\.gz: has more than 2,097,152 bytes",
        "all.json.gz": r"all\.json\.gz: has more than 2,097,152 bytes",
        "header.tar.gz": r"header\.tar\.gz: a header: has more than 1,048,576 bytes",
        "one.arrow": r"one\.arrow: row 2: has more than 1,048,576 bytes",
        "one.json": r"one\.json: object 2: has more than 1,048,576 bytes",
        "many.parquet": r"many\.parquet: has more than 2,097,152 bytes",
        "member.tar": r"member\.tar: a\.txt: has more than 1,048,576 bytes",
        "one.parquet": r"one\.parquet: a record of row group 1: has more than 1,048,576 bytes",
    }.items():
        with pytest.raises(DataError, match=message) as refused:
            list(records(tmp_path / name, most))
        assert "raise data.limits." in refused.value.hint
        if name not in ("all.json.gz", "header.tar.gz"):
            assert list(records(tmp_path / name))


@pytest.mark.parametrize("part", [1, 2, 3, 7, 2**20])
def test_a_list_is_read_in_parts_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr("dtrain.data.records.PART", part)
    path = tmp_path / "a.json"
    value = [{"a": 'ü\U0001f600\\"', "b": [1.5, -2e3, None, True, {}]}, {}, {"a": "\u2028]},["}]
    for text in (json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False), f" \n{json.dumps(value)}\n "):
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert [fields for _, fields in records(path)] == value
    for text, message in {
        '[{"a": 1} {}]': "object 1: is not JSON: no ','",
        '[{"a": 1},]': "object 2: is not JSON",
        '[{"a": tru}, {}]': "object 1: is not JSON",
        '[{"a": "x': "object 1: is not JSON",
        '[{"a": 1}': "object 1: is not JSON",
        "[{}] {}": "something follows the list",
        "[{}, 12]": "object 2: is int",
        "": "is not JSON",
        "12": "is not a list",
        '{"a": [\n1]}': "is not a list",
        '{"a": [\n1}': "is not JSON",
    }.items():
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            list(records(path))


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
@pytest.mark.parametrize("damage", ["header", "cut", "inside"])
def test_a_damaged_tar_loses_no_record_in_silence(tmp_path: Path, suffix: str, damage: str) -> None:
    whole = write(tmp_path, "rows.tar").read_bytes()  # members of two blocks: header and content
    at = 6 * tarfile.BLOCKSIZE
    damaged = {
        "header": whole[:at] + b"x" * 300 + whole[at + 300 :],
        "cut": whole[:at],
        "inside": whole[: at + tarfile.BLOCKSIZE + 5],
    }[damage]
    path = tmp_path / f"damaged.{suffix}"
    path.write_bytes(gzip.compress(damaged) if suffix == "tar.gz" else damaged)
    with pytest.raises(DataError, match=r"damaged\.tar"):
        list(records(path))


def test_a_member_that_is_no_object_is_named(tmp_path: Path) -> None:
    tar_of(tmp_path / "a.tar", {"one.json": b"{}", "two.json": b"[]"})
    with pytest.raises(DataError, match=r"a.tar: two.json: is list"):
        list(records(tmp_path / "a.tar"))
