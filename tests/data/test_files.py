"""Files in object storage: copied once, copied again when they change, and every failure named."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from dtrain.core.errors import DataError, EnvironmentFault
from dtrain.data.chat import Chat
from dtrain.data.files import resolve_files
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens
from tests.conftest import Dtrain


@pytest.fixture
def bucket() -> Iterator[Any]:
    """A file system in memory, read by the same interface as a bucket."""
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/bucket", recursive=True)


def put(files: Any, name: str, content: bytes) -> None:
    files.pipe(f"/bucket/{name}", content)


def test_a_glob_is_copied_once_and_again_when_a_file_changes(bucket: Any, tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        put(bucket, name, name.encode() * 10)
    cache = str(tmp_path)
    found = resolve_files(("memory://bucket/*.txt",), "text", cache=cache)
    assert [path.name for path in found] == ["a.txt", "b.txt"]
    assert [path.read_bytes() for path in found] == [b"a.txt" * 10, b"b.txt" * 10]
    put(bucket, "folder.txt/x", b"a")  # a folder that the glob matches as well
    before = [path.stat().st_mtime_ns for path in found]
    assert resolve_files(("memory://bucket/*.txt", "memory://bucket/a.txt"), "text", cache=cache) == found
    assert [path.stat().st_mtime_ns for path in found] == before
    put(bucket, "a.txt", b"other" * 10)  # of the same size
    again = resolve_files(("memory://bucket/*.txt",), "text", cache=cache)
    assert again == found
    assert again[0].read_bytes() == b"other" * 10
    assert again[1].stat().st_mtime_ns == before[1]
    found[1].write_bytes(b"cut off")
    assert resolve_files(("memory://bucket/b.txt",), "text", cache=cache)[0].read_bytes() == b"b.txt" * 10


def test_rows_are_those_of_the_same_local_files(bucket: Any, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 200, 500).astype(np.uint16)
    contents = {
        "t.txt": b"abcdefghij" * 60,
        "c.jsonl": "".join(json.dumps({"prompt": "x" * i, "response": "y"}) + "\n" for i in range(1, 20)).encode(),
        "n.bin": tokens.tobytes(),
    }
    for name, content in contents.items():
        put(bucket, name, content)
        (tmp_path / name).write_bytes(content)
    cache = {"cache": str(tmp_path / "cache")}
    for kind, name, how in ((Text, "t.txt", {}), (Chat, "c.jsonl", {"template": "plain"}), (Tokens, "n.bin", {})):
        there, here = (
            kind(files=(f"{place}{name}",), length=16, **how, **cache).open("train")
            for place in ("memory://bucket/", f"{tmp_path}/")
        )
        assert there.fingerprint == here.fingerprint
        for one, other in zip(there.rows(np.arange(4)).values(), here.rows(np.arange(4)).values(), strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://bucket/no.txt", "no file of text matches memory://bucket/no.txt"),
        ("memory://bucket/*.no", "no file of text matches"),
        ("memory://bucket", "no file of text matches"),
        ("nonsense://bucket/a", "cannot be read: .*nonsense"),
    ],
)
def test_what_cannot_be_read_is_named(bucket: Any, tmp_path: Path, address: str, message: str) -> None:
    put(bucket, "a.txt", b"a")
    with pytest.raises(DataError, match=message):
        resolve_files((address,), "text", cache=str(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_what_reads_an_address_is_named_with_its_extra(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="needs the package s3fs") as refused:
        resolve_files(("s3://bucket/a",), "text", cache=str(tmp_path))
    assert refused.value.hint == "pip install 'dtrain[remote]'"


@pytest.mark.slow
def test_check_copies_nothing(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "far.yaml").write_text(
        "model: {kind: decoder, vocab: 256, context: 64, layers: 1, width: 16, heads: 2}\n"
        "data: {kind: chat, files: ['memory://bucket/*.jsonl'], length: 64, cache: cache, template: plain}\n"
        "optimizer: {kind: adamw, lr: 1e-3}\nbatch: 8\nsteps: 4\n"
    )
    shown = dtrain("check", "far.yaml", "evaluate.questions=['memory://bucket/q.jsonl']").stderr
    assert "data.files: memory://bucket/*.jsonl, which the run copies from there" in shown
    assert "evaluate.questions: memory://bucket/q.jsonl" in shown
    assert not (tmp_path / "cache").exists()
