"""Held-out examples that are in the training data as well."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dtrain.data.arrays import Arrays
from dtrain.data.batch import Feature
from dtrain.data.chat import Chat
from dtrain.data.columns import ImageColumn, TokensColumn
from dtrain.data.data_check import DataCheck
from dtrain.data.images import Images
from dtrain.data.mixture import Mixture, Weighted
from dtrain.data.npz import Npz
from dtrain.data.overlap import overlap, row_hashes
from dtrain.data.record_data import Records
from dtrain.data.source import Data
from dtrain.data.table import Table
from tests.conftest import Dtrain


def found(data: Data) -> list[str]:
    return list(overlap(data.open("train"), data.open("test")))


def chats(path: Path, numbers: list[int]) -> str:
    turns = [
        [{"role": "user", "content": f"{one}?"}, {"role": "assistant", "content": f"{one}, yes."}] for one in numbers
    ]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
    return str(path)


def chat(tmp_path: Path, files: str, **options: object) -> Chat:
    return Chat(files=(files,), length=32, template="plain", cache=str(tmp_path / "cache"), **options)  # pyright: ignore[reportArgumentType]


def test_copies_of_a_conversation_are_in_one_split(tmp_path: Path) -> None:
    data = chat(tmp_path, chats(tmp_path / "c.jsonl", [number % 40 for number in range(120)]), pack=False)
    splits = {split: data.open(split) for split in ("train", "test")}
    rows = {split: {row.tobytes() for row in of.rows(np.arange(len(of)))["token"]} for split, of in splits.items()}
    assert rows["train"] and rows["test"]
    assert not rows["train"] & rows["test"]
    assert sum(map(len, splits.values())) == 120  # none is lost
    assert len(rows["train"]) + len(rows["test"]) == 40
    assert any(f"{len(rows['train'])} distinct records" in line for line in splits["train"].notes)
    assert not found(data)
    # the same numbers of records without copies are split as before, by number alone
    single = chat(tmp_path, chats(tmp_path / "s.jsonl", list(range(120))), pack=False)
    assert len(single.open("test")) == 12
    assert "copies" not in " ".join(single.open("train").notes)


def test_held_out_examples_in_the_training_data_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    train, test = chats(tmp_path / "a.jsonl", [1, 2, 3]), chats(tmp_path / "b.jsonl", [3, 4])
    own = chat(tmp_path, train, test_files=(test,))
    assert found(own) == ["1 of the 2 held-out examples is in the training data as well"]

    (tmp_path / "a.csv").write_text("x,y,label\n1,2,a\n3,4,b\n5,6,a\n")
    (tmp_path / "b.csv").write_text("x,y,label\n9,2,a\n5,6,a\n3,4,a\n")
    table = Table(files=(str(tmp_path / "a.csv"),), test_files=(str(tmp_path / "b.csv"),), label="label")
    [line] = found(table)
    assert line.startswith("1 of the 3 held-out examples is in the training data as well; the first: ")
    assert line.endswith("b.csv: row 2")

    image, label = np.ones((10, 2, 2, 1), np.uint8), np.zeros(10, np.int32)
    np.savez(tmp_path / "a.npz", image=image, label=label)
    [line] = found(Npz(file=str(tmp_path / "a.npz"), classes=1, test=0.5))
    assert "held-out examples" in line
    assert "a.npz: row " in line


def test_equal_pictures_are_found_by_their_digests(tmp_path: Path) -> None:
    from PIL import Image

    for folder, values in (("train/a", (1, 2)), ("train/b", (3,)), ("test/a", (2,)), ("test/b", (4,))):
        (tmp_path / "photos" / folder).mkdir(parents=True)
        for value in values:
            Image.new("L", (4, 4), value * 9).save(tmp_path / "photos" / folder / f"{value}.png")
    data = Images(root=str(tmp_path / "photos"), size=(4, 4), cache=str(tmp_path / "cache"))
    [line] = found(data)
    assert line.startswith("1 of the 2 held-out examples is in the training data as well")
    assert line.endswith("test/a/2.png")
    check = DataCheck()  # which reads only the files of equal sizes
    data.inspect(check)
    assert line in check.notes
    shutil.make_archive(str(tmp_path / "photos"), "zip", tmp_path / "photos")
    check = DataCheck()
    dataclasses.replace(data, root=str(tmp_path / "photos.zip")).inspect(check)
    assert any(note.startswith("1 of the 2 held-out examples is in the training data") for note in check.notes)


def test_a_mixture_names_the_source(tmp_path: Path) -> None:
    first, second = chats(tmp_path / "a.jsonl", [1, 2, 3]), chats(tmp_path / "b.jsonl", [3, 4])
    other = chats(tmp_path / "c.jsonl", [7])
    parts = {
        "one": chat(tmp_path, first, test_files=(other,)),
        "two": chat(tmp_path, other, test_files=(second,)),
    }
    mixture = Mixture(sources=tuple(Weighted(name=name, data=data) for name, data in parts.items()))
    assert found(mixture) == [
        "one: 1 of the 1 held-out example is in the training data as well",  # what `two` trains on
        "two: 1 of the 2 held-out examples is in the training data as well",  # what `one` trains on
    ]


def test_a_hash_is_of_all_arrays_of_a_row() -> None:
    x, y = np.array([[1, 2], [1, 2], [1, 2]]), np.array([0, 1, 0])
    first, second, third = row_hashes(x, y).tolist()
    assert first == third != second
    example = {"x": Feature((2,), "int64"), "y": Feature((), "int64")}
    assert Arrays({"x": x, "y": y}, example, "").content_hashes.tolist() == [first, second, third]  # pyright: ignore[reportOptionalMemberAccess]


def test_records_and_their_pictures_are_compared(tmp_path: Path) -> None:
    from PIL import Image

    for name, value in (("a", 9), ("b", 18), ("c", 9)):
        Image.new("L", (4, 4), value).save(tmp_path / f"{name}.png")

    def file(name: str, rows: list[tuple[str, str]]) -> str:
        made = [json.dumps({"image": f"{picture}.png", "caption": text}) for picture, text in rows]
        (tmp_path / name).write_text("\n".join(made))
        return str(tmp_path / name)

    columns = {"image": ImageColumn(size=(4, 4)), "caption": TokensColumn(length=8)}
    train = file("train.jsonl", [("a", "dog"), ("b", "cat")])
    test = file("test.jsonl", [("c", "dog"), ("c", "cat"), ("b", "cow")])  # c has the pixels of a
    data = Records(files=(train,), test_files=(test,), columns=columns, cache=str(tmp_path / "cache"))
    [line] = found(data)
    assert line.startswith("1 of the 3 held-out examples is in the training data as well; the first: ")
    assert line.endswith("c.png")


@pytest.mark.slow
def test_a_run_keeps_what_it_found_for_its_report(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{n},{n % 2}\n" for n in range(40)))
    (tmp_path / "n.csv").write_text("a,y\n3,1\n99,0\n")
    dtrain("new", "t.csv", "--label", "y")
    found = "1 of the 2 held-out examples is in the training data as well; the first: "
    done = dtrain("run", "t.yaml", "steps=4", "batch=8", "data.test=0.0", "data.test_files=[n.csv]")
    assert f"warning: {found}" in done.stderr + done.stdout
    assert f"  warning: {found}n.csv: row 1\n" in dtrain("report", "t").stdout.replace(f"{tmp_path}/", "")
