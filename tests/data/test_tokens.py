"""Files of tokens and of text: rows equal the written tokens, and invalid files are reported."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.errors import DataError
from dtrain.data import text as text_module
from dtrain.data.files import resolve_files
from dtrain.data.order import Order
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens
from dtrain.inference.evaluate import evaluated
from dtrain.models.nn.model import Loss
from dtrain.recipe.load import load
from tests.conftest import SHARED
from tests.data.test_tokenizer import word_level

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = "cc660e04a3bef809b5436e822536cafefa278d55fb3639fb3e93665590d6fc0a"
STREAM = np.arange(1000, dtype=np.uint16)


def write_bin(path: Path, tokens: np.ndarray, header: int | None = None) -> str:
    head = np.zeros(256, np.int32)
    head[:3] = [header or 0, 1, len(tokens)]
    path.write_bytes((head.tobytes() if header else b"") + tokens.tobytes())
    return str(path)


@pytest.mark.parametrize("how", ["bin", "bin32", "llm.c", "llm.c32", "npy"])
def test_every_format_gives_the_same_rows(tmp_path: Path, how: str) -> None:
    path, wide = tmp_path / "train.bin", STREAM.astype(np.uint32)
    if how == "npy":
        path = tmp_path / "train.npy"
        np.save(path, STREAM)
    else:
        write_bin(path, wide if "32" in how else STREAM, {"llm.c": 20240520, "llm.c32": 20240801}.get(how))
    data = Tokens(files=(str(path),), length=10, dtype="uint32" if how == "bin32" else "uint16", random=False)
    rows = data.open("train").rows(np.array([0, 3]))
    assert rows["token"].tolist() == [list(range(10)), list(range(30, 40))]
    assert np.array_equal(rows["target"], rows["token"] + 1)
    assert rows["token"].dtype == np.int32


def test_the_end_of_each_file_is_held_out(tmp_path: Path) -> None:
    files = tuple(write_bin(tmp_path / f"{i}.bin", STREAM + 1000 * i) for i in range(2))
    data = Tokens(files=files, length=10, test=0.2, random=False)
    train, test = data.open("train"), data.open("test")
    assert (len(train), len(test)) == (2 * 79, 2 * 19)
    train_tokens = train.rows(np.arange(len(train)))["token"]
    test_tokens = test.rows(np.arange(len(test)))["token"]
    assert train_tokens.max() < 1800
    assert test_tokens.min() == 800
    assert set(test_tokens.ravel()) <= {*range(800, 1000), *range(1800, 2000)}


def test_no_row_reaches_over_the_end_of_a_file(tmp_path: Path) -> None:
    files = tuple(write_bin(tmp_path / f"{i}.bin", STREAM[:25] + 100 * i) for i in range(3))
    source = Tokens(files=files, length=10, test_files=files, random=True).open("train")
    assert source.random_starts == 3 * 15
    rows = source.rows(np.arange(45))
    assert (np.diff(np.concatenate([rows["token"], rows["target"][:, -1:]], 1)) == 1).all()


def test_documents_are_kept_apart(tmp_path: Path) -> None:
    tokens = np.array([5, 6, 0, 7, 8, 9, 0, 4, 3, 2, 1], np.uint16)
    data = Tokens(files=(write_bin(tmp_path / "a.bin", tokens),), length=10, test=0.0, random=False, separator=0)
    row = {name: values[0].tolist() for name, values in data.open("train").rows(np.array([0])).items()}
    assert row["document"] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert row["position"] == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    assert row["target"] == [6, 0, -1, 8, 9, 0, -1, 3, 2, 1]
    assert set(data.example()) == set(row)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0" * 11, "11 bytes are not a multiple of the 2 bytes of uint16"),
        (b"", "contains no tokens"),
        (b"\1\0" * 5, "too short for one row: 5 tokens in the train split, a row needs 11"),
        (np.array([20240520, 1, 7, *[0] * 253], np.int32).tobytes() + b"\0\0" * 5, "declares 7 tokens, but 5 follow"),
    ],
)
def test_a_damaged_file_is_named_with_its_numbers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        Tokens(files=(str(path),), length=10, test=0.0).open("train")
    assert "bad.bin" in caught.value.message


def test_missing_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file of tokens matches .*none\.bin"):
        Tokens(files=(str(tmp_path / "none.bin"),), length=10).open("train")


def test_an_array_of_something_else_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4), np.float32))
    with pytest.raises(DataError, match="the array is float32 of shape 3 x 4; tokens must be integers in one dim"):
        Tokens(files=(str(tmp_path / "a.npy"),), length=2).open("train")


def text(tmp_path: Path, **more: Any) -> Text:
    (tmp_path / "a.txt").write_text("to be, or not to be")
    (tmp_path / "b.txt").write_text("that is the question")
    options = {"files": (str(tmp_path / "*.txt"),), "length": 5, "test": 0.0, "cache": str(tmp_path / "cache")}
    return Text(**(options | {"random": False} | more))


def test_bytes_of_all_files_follow_each_other(tmp_path: Path) -> None:
    data = text(tmp_path)
    source = data.open("train")
    assert len(source) == 7
    rows = source.rows(np.arange(7))["token"]
    assert data.open_tokenizer().decode(rows.ravel().tolist()) == "to be, or not to bethat is the ques"


def test_a_file_is_a_document_where_they_are_packed(tmp_path: Path) -> None:
    rows = text(tmp_path, pack=True, length=30).open("train").rows(np.array([0]))
    assert rows["document"][0].tolist() == [0] * 20 + [1] * 10
    assert rows["token"][0, 19] == 0
    assert rows["target"][0, 19] == -1


def test_text_is_tokenised_once_for_the_same_content(tmp_path: Path) -> None:
    text(tmp_path).open("train")
    (made,) = (tmp_path / "cache").glob("tokens-*.bin")
    before = made.stat().st_mtime_ns
    text(tmp_path).open("train")
    assert made.stat().st_mtime_ns == before
    data = text(tmp_path)
    (tmp_path / "a.txt").write_text("another text altogether")
    data.open("train")
    assert len(list((tmp_path / "cache").glob("tokens-*.bin"))) == 2


def test_a_tokenizer_file_is_read_and_gives_the_text_back(tmp_path: Path) -> None:
    path = SHARED / "data" / "tokenizers" / "tiny_bpe" / "tokenizer.json"
    if not path.is_file():
        pytest.skip("this checkout has no shared/ folder with the tokenizer")
    data = text(tmp_path, tokenizer=str(path), length=3)
    tokenizer = data.open_tokenizer()
    text_back = tokenizer.decode(tokenizer.encode(b"to be, or not").tolist())
    assert text_back.replace(" ", "") == "tobe,ornot"  # this tokenizer does not keep spaces
    assert data.open("train").example["token"].values is not None


def test_an_invalid_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"model": "nothing"}))
    with pytest.raises(DataError, match=r"t\.json is not a valid tokenizer\.json"):
        text(tmp_path, tokenizer=str(tmp_path / "t.json")).open("train")
    with pytest.raises(DataError, match="no such tokenizer"):
        text(tmp_path, tokenizer=str(tmp_path / "u.json")).open("train")


def test_the_shipped_text_is_fixed(tmp_path: Path) -> None:
    recipe = load(RECIPES / "decoder-tiny.yaml", [f"data.cache={tmp_path}"])
    assert isinstance(recipe.data, Text)
    assert [len(recipe.data.open(split)) for split in ("train", "test")] == [1043, 115]
    (file,) = resolve_files(recipe.data.files, "text")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHIPPED, "the numbers in recipes and docs depend on it"


def test_bytes_per_token_are_one_for_bytes_and_measured_for_a_tokenizer(tmp_path: Path) -> None:
    text = "to be or not to be " * 200
    (tmp_path / "text.txt").write_text(text)
    where = {"files": (str(tmp_path / "text.txt"),), "length": 8, "cache": str(tmp_path)}
    assert Text(**where).open("test").bytes_per_token == 1.0  # pyright: ignore[reportAttributeAccessIssue]
    word_level(tmp_path / "tokenizer.json", {"to": 0, "be": 1, "or": 2, "not": 3})
    rows = Text(**where, tokenizer=str(tmp_path / "tokenizer.json")).open("test")
    # words of 2, 2, 2, 3, 2, 2 letters and the blanks between them
    assert rows.bytes_per_token == pytest.approx(19 / 6, rel=0.02)  # pyright: ignore[reportAttributeAccessIssue]


def test_bytes_per_token_are_those_of_the_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("to " * 600 + "notwithstanding " * 600)
    word_level(tmp_path / "tokenizer.json", {"to": 0, "notwithstanding": 1})
    file = (str(tmp_path / "text.txt"),)
    data = Text(files=file, test_files=file, length=8, cache=str(tmp_path), tokenizer=str(tmp_path / "tokenizer.json"))
    whole = 600 * (3 + 16) / 1200
    for together, parts, within in ((2000, 100, 0.01), (100, 100, 0.01), (50, 6, 0.02)):
        monkeypatch.setattr(text_module, "TOGETHER", together)
        monkeypatch.setattr(text_module, "PARTS", parts)
        assert data.open("test").bytes_per_token == pytest.approx(whole, rel=within)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("named", ["bytes", "tokenizer.json"])
def test_ends_of_documents_are_predicted_and_are_no_text(tmp_path: Path, named: str) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("to be or not to be"[: 18 - 2 * number])
    vocab = {"to": 0, "be": 1, "or": 2, "not": 3, "t": 4, "n": 5, "<|endoftext|>": 6}
    word_level(tmp_path / "tokenizer.json", vocab)
    name = named if named == "bytes" else str(tmp_path / named)
    where = {"files": (str(tmp_path / "*.txt"),), "test_files": (str(tmp_path / "*.txt"),), "length": 8}
    data = Text(**where, cache=str(tmp_path), tokenizer=name, pack=True)
    texts = [(tmp_path / f"{number}.txt").read_text() for number in range(4)]
    if named == "bytes":  # a document of n bytes: n targets, of which n - 1 are text
        expected = sum(len(text) - 1 for text in texts) / sum(map(len, texts))
    else:  # a document of n words: n targets; the first word is not one
        words = [text.split() for text in texts]
        expected = sum(len(" ".join(w)) - len(w[0]) for w in words) / sum(map(len, words))
    assert data.open("test").bytes_per_token == pytest.approx(expected)  # pyright: ignore[reportAttributeAccessIssue]


def test_bits_per_byte_are_those_of_the_loss() -> None:
    sums = [Loss(jnp.float32(20.0), jnp.float32(10.0), {})]
    values = evaluated(sums, 4.0)
    assert values["eval/bits_per_byte"] == pytest.approx(2.0 / math.log(2) / 4)
    assert "eval/bits_per_byte" not in evaluated(sums, 0.0)
    assert "eval/perplexity" not in evaluated(sums, None)


def test_each_token_is_trained_once_in_an_epoch_unless_rows_begin_anywhere(tmp_path: Path) -> None:
    files = tuple(write_bin(tmp_path / f"{i}.bin", STREAM + 1000 * i) for i in range(2))
    for data, share in ((Tokens(files=files, length=10), 1.0), (Tokens(files=files, length=10, random=True), 0.63)):
        train = data.open("train")
        order = Order(len(train), 0, train.random_starts)
        seen = train.rows(order(np.arange(len(train))))["token"]
        assert len(np.unique(seen)) / seen.size == pytest.approx(share, abs=0.05)
        again = train.rows(order(np.arange(len(train), 2 * len(train))))["token"]
        assert (again != seen).any()
