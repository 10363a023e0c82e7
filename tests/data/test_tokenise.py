"""Tokens of many files: the same whether made at once or group by group, kept after an interruption, cleaned up."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.core.errors import DataError, EnvironmentFault
from dtrain.data import tokenise
from dtrain.data.chat import Chat
from dtrain.data.mixture import Mixture, Weighted
from dtrain.data.preference import Preference
from dtrain.data.text import Text
from dtrain.data.tokenise import grouped_files, tokenise_in_processes
from tests.conftest import Dtrain, bare_environment
from tests.waiting import until


def files(folder: Path) -> Path:
    """Four files of conversations, of pairs and of text."""
    for number in range(4):
        rows = [{"prompt": "p" * (1 + i % 9), "response": f"{number} {i}"} for i in range(50)]
        pairs = [{"prompt": f"{i}?", "chosen": "yes" * number, "rejected": "no"} for i in range(9)]
        for name, values in (("c", rows), ("p", pairs)):
            (folder / f"{name}{number}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
        (folder / f"t{number}.txt").write_text(f"{number} is a number. " * 40)
    return folder


def data_of(folder: Path, kind: str, cache: str) -> Any:
    how: dict[str, Any] = {"length": 32, "cache": str(folder / cache)}
    if kind == "text":
        return Text(files=(str(folder / "t*.txt"),), pack=True, **how)
    if kind == "chat":
        return Chat(files=(str(folder / "c*.jsonl"),), template="plain", **how)
    return Preference(files=(str(folder / "p*.jsonl"),), template="plain", **how)


def cached(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


@pytest.mark.parametrize("kind", ["text", "chat", "preference"])
def test_groups_of_files_give_the_tokens_of_all_at_once(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(tmp_path)
    whole = data_of(tmp_path, kind, "whole")
    assert whole.file_groups("train") == []  # small files are one group
    expected = whole.open("train")
    monkeypatch.setattr(tokenise, "GROUP", 1)
    parts = data_of(tmp_path, kind, "parts")
    assert len(parts.file_groups("train")) == 4
    assert parts.open("train").fingerprint == expected.fingerprint
    assert cached(tmp_path / "parts") == cached(tmp_path / "whole")  # the parts are deleted
    assert parts.file_groups("train") == []
    for one, other in zip(*(source.rows(np.arange(3)).values() for source in (parts.open("train"), expected))):
        assert np.array_equal(one, other)


@pytest.mark.slow
def test_what_is_made_ahead_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "GROUP", 1)
    data = data_of(files(tmp_path), "chat", "cache")
    mixture = Mixture(sources=(Weighted(name="a", data=data), Weighted(name="b", data=data_of(tmp_path, "text", "b"))))
    made = mixture.file_groups("train")
    assert len(made) == 8
    assert {piece.name for piece in tokenise_in_processes(made, 2)} == {piece.name for piece in made}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("tokens-part*.bin")}
    assert len(before) == 4
    for piece in data.file_groups("train"):
        piece.tokens()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    mixture.open("train")
    assert not list((tmp_path / "cache").glob("tokens-part*"))


def test_groups_have_at_least_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "GROUP", 10)
    sizes = [4, 4, 4, 30, 1, 1]
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(b"x" * size)
    assert grouped_files([tmp_path / str(number) for number in range(6)]) == [[0, 1, 2], [3], [4, 5]]


@pytest.mark.nightly
def test_an_interrupted_preparation_keeps_what_is_done(dtrain: Dtrain, tmp_path: Path) -> None:
    # 16 MiB in each file, so that each is a group: most records are longer than a row and are left out
    long = (json.dumps({"prompt": "p" * 800, "response": "x"}) + "\n") * 20_500
    rows = long + "".join(json.dumps({"prompt": "p" * (1 + i % 40), "response": f"{i}"}) + "\n" for i in range(500))
    for number in range(6):
        (tmp_path / f"c{number}.jsonl").write_text(f'{{"prompt": "{number}", "response": "1"}}\n{rows}')
    (tmp_path / "r.yaml").write_text(
        "model: {kind: decoder, vocab: 256, context: 64, layers: 1, width: 16, heads: 2}\n"
        "data: {kind: chat, files: ['c*.jsonl'], length: 64, template: plain, cache: cache}\n"
        "optimizer: {kind: adamw, lr: 1e-3}\nbatch: 8\nsteps: 4\n"
    )
    command = [sys.executable, "-m", "dtrain", "data", "prepare", "r.yaml", "--jobs", "2"]
    running = subprocess.Popen(command, cwd=tmp_path, env=bare_environment(), stderr=subprocess.PIPE, text=True)
    until(lambda: list((tmp_path / "cache").glob("tokens-part*.json")))
    running.send_signal(signal.SIGINT)
    shown = running.communicate(timeout=200)[1]
    assert running.returncode == 130, shown
    assert "Traceback" not in shown
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("tokens-part*.bin")}
    assert 1 <= len(kept) < 6
    assert not list((tmp_path / "cache").glob(".tokens*"))  # no unfinished file
    log = subprocess.run([*command, "--debug"], cwd=tmp_path, env=bare_environment(), capture_output=True, check=True)
    assert b"groups of files" in log.stderr
    done = dtrain("data", "prepare", "r.yaml")
    assert "rows of 64 tokens" in done.stdout
    assert not list((tmp_path / "cache").glob("tokens-part*"))


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
