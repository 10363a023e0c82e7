"""`dtrain new`: what is seen in a user's data, and the recipe that is written for it."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from dtrain.core.errors import DataError, RecipeError
from dtrain.recipe.examine import examine
from dtrain.recipe.load import load, part
from dtrain.recipe.new import new_recipe, readings, selected
from dtrain.recipe.recipe import Data
from dtrain.recipe.sizes import with_sizes
from tests.conftest import Dtrain

DRAW = np.random.default_rng(0)


def pictures(folder: Path, counts: dict[str, int], mode: str = "RGB", side: int = 20) -> Path:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            shape = (side, side + 4, 3) if mode == "RGB" else (side, side + 4)
            image.fromarray(DRAW.integers(0, 256, shape).astype(np.uint8), mode).save(folder / name / f"{number}.png")
    return folder


def table(path: Path, label: str = "price", rows: int = 120) -> Path:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    lines = [f"id,rooms,city,note,sold,{label}"]
    for number in range(rows):
        rooms = "" if number % 20 == 0 else str(number % 5)
        lines.append(f"{number},{rooms},{'AB'[number % 2]},text {number},2020-01-{number % 28 + 1:02},{number * 1.5}")
    path.write_text("\n".join(lines) + "\n")
    return path


def chats(path: Path) -> Path:
    rows = [{"prompt": f"what is {n}", "response": f"it is {n}"} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text(path: Path) -> Path:
    path.write_text("all work and no play\n" * 400)
    return path


def arrays(path: Path) -> Path:
    np.savez(path, x=DRAW.normal(size=(80, 3)).astype(np.float32), y=DRAW.integers(0, 2, 80), other=np.zeros(80))
    return path


def idx(folder: Path) -> Path:
    folder.mkdir()
    for split, count in (("train", 30), ("t10k", 10)):
        head = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in (count, 9, 9))
        (folder / f"{split}-images-idx3-ubyte").write_bytes(head + bytes(count * 81))
        labels = bytes(n % 4 for n in range(count))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1]) + count.to_bytes(4, "big") + labels)
    return folder


CASES: dict[str, Any] = {
    "images": lambda folder: pictures(folder / "photos", {"cat": 20, "dog": 30}),
    "table": lambda folder: table(folder / "homes.csv"),
    "chat": lambda folder: chats(folder / "chats.jsonl"),
    "text": lambda folder: text(folder / "book.txt"),
    "npz": lambda folder: arrays(folder / "rows.npz"),
    "idx": lambda folder: idx(folder / "digits"),
}


def test_every_kind_that_reads_files_of_its_own_form_recognises_them() -> None:
    known = {member.kind for member in get_args(Data)}
    # others name a class, other sources, tokens without a tokenizer, columns of any kinds, or have no files
    others = {"digits", "synthetic", "custom", "mixture", "tokens", "records", "preference", "feedback"}
    assert set(CASES) == known - others


@pytest.mark.parametrize("kind", CASES)
def test_the_recipe_for_data_of_each_kind_is_one_that_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data = CASES[kind](tmp_path)
    ((found, guess),) = selected(data)
    assert found == kind
    made = new_recipe(data, kind, guess)
    path = tmp_path / f"{made.name}.yaml"
    path.write_text(made.text)
    examine(path, [], 1, data=True)
    recipe = load(path)
    sized = with_sizes(recipe)
    assert not sized.model.left_out
    assert recipe.total_steps(len(recipe.data.open("train"))) > 1
    assert f"dtrain run {path.name}" in made.text
    assert max(map(len, made.text.splitlines())) <= 120


def test_what_is_seen_in_pictures_is_said_and_used(tmp_path: Path) -> None:
    data = pictures(tmp_path / "My Photos_v2", {"cat": 4, "dog": 16}, mode="L")
    (tmp_path / "My Photos_v2" / "notes.txt").write_text("x")
    ((kind, guess),) = readings(data)
    assert guess.seen == "20 pictures of 2 classes: cat 4, dog 16"
    assert guess.notes == ("left out: 1 .txt files",)
    assert (guess.section["size"], guess.section["channels"], guess.section["test"]) == ([20, 20], 1, 0.2)
    made = new_recipe(data, kind, guess)
    assert made.name == "my-photos-v2"
    assert "class_weights: balanced  # dog has" in made.text
    assert "flip" not in made.text


def test_what_is_seen_in_a_table_is_said_and_used(tmp_path: Path) -> None:
    ((_, guess),) = selected(table(tmp_path / "homes.csv"))
    assert guess.seen.endswith(
        "columns 1 of numbers, 1 of texts, 1 of dates; 'price' is predicted, 120 different numbers"
    )
    assert guess.section["predict"] == "number"
    assert guess.section["columns"] == ["rooms", "city", "sold"]
    assert guess.section["missing"] == "median"
    assert guess.notes == ("column 'note' cannot be used: 120 different texts",)


def test_a_table_without_a_usual_label_is_read_as_its_user_says(tmp_path: Path) -> None:
    path = table(tmp_path / "homes.csv", label="worth")
    found = readings(path)
    assert [guess.section["label"] for _, guess in found] == ["rooms", "city", "worth"]
    assert "predict" not in dict(found[1][1].section)  # a text is a class
    ((_, guess),) = selected(path, label="worth")
    assert guess.section["label"] == "worth"
    with pytest.raises(RecipeError, match="no such column") as refused:
        selected(path, label="wroth")
    assert refused.value.hint == "these can: rooms, city, worth"
    with pytest.raises(RecipeError, match="--kind chat"):
        selected(path, kind="chat")


def test_any_column_can_be_predicted_where_one_has_a_usual_name(tmp_path: Path) -> None:
    path = table(tmp_path / "homes.csv")
    ((_, guess),) = selected(path, label="city")
    assert guess.section["label"] == "city"


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("label", [0.0, 1.0], "class"),  # as pandas writes whole numbers with a gap
        ("label", [*range(30)], "class"),
        ("sales", [*range(30)], "number"),
        ("sales", [1.5, 2.5], "number"),
        ("sales", ["$1,200", "$3,100"], "class"),
    ],
)
def test_a_label_is_a_class_or_a_number(tmp_path: Path, column: str, values: list[Any], expected: str) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    rows = [values[number % len(values)] for number in range(90)]
    parquet.write_table(pa.table({"a": [0.5 * n for n in range(90)], column: rows}), tmp_path / "t.parquet")
    ((_, guess),) = selected(tmp_path / "t.parquet", label=column)
    assert guess.section.get("predict", "class") == expected


def test_names_of_others_cannot_break_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    monkeypatch.chdir(tmp_path)
    lines = ['"Rooms\n(n)",.5,"a: b #",label']
    lines += [f"{'' if n % 9 == 0 else n},{n / 2},{n},{'rare' if n < 3 else 'often'}" for n in range(80)]
    Path("~odd #1.csv").write_text("\n".join(lines).replace("rare", '"ra\nre"') + "\n")
    ((kind, guess),) = selected(Path("./~odd #1.csv"))
    made = new_recipe(Path("./~odd #1.csv"), kind, guess)
    Path("odd.yaml").write_text(made.text)
    assert "class_weights: balanced" in made.text
    assert load("odd.yaml").data.label == "label"
    examine(Path("odd.yaml"), [], None, data=True)


def test_files_for_testing_without_the_label_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "kaggle"
    folder.mkdir()
    table(folder / "train.csv")
    (folder / "test.csv").write_text("id,rooms,city,note,sold\n1,2,A,x,2020-01-01\n")
    ((_, guess),) = selected(folder)
    assert "test_files" not in guess.section
    assert f"left out: {folder}/test.csv, which has no 'price'" in guess.notes


def test_long_conversations_are_cut_and_not_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"what is {n}", "response": "it is " * 400} for n in range(60)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ((kind, guess),) = selected(tmp_path / "long.jsonl")
    assert (guess.section["length"], guess.section["too_long"]) == (1024, "cut")
    data = part(Data, {"kind": kind, **guess.section}, "data")
    assert len(data.open("train")) + len(data.open("test")) >= 50


def test_texts_in_folders_of_the_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "books" / "old").mkdir(parents=True)
    text(tmp_path / "books" / "a.txt")
    text(tmp_path / "books" / "old" / "b.txt")
    ((_, guess),) = selected(tmp_path / "books")
    assert len(guess.section["files"]) == 2


def test_data_that_no_model_takes_is_refused_before_a_recipe_is_written(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((40, 3), np.float32), y=np.zeros((40, 2), np.float32))
    with pytest.raises(DataError, match="which arrays are pictures or numbers, and which labels"):
        selected(tmp_path / "a.npz")
    with pytest.raises(DataError, match="of one class, cat"):
        readings(pictures(tmp_path / "photos", {"cat": 3}))


def test_files_of_splits_are_those_of_usual_names(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    for name in ("train", "test"):
        chats(folder / f"{name}.jsonl")
    ((_, guess),) = readings(folder)
    assert guess.section["files"] == [f"{folder}/train.jsonl"]
    assert guess.section["test_files"] == [f"{folder}/test.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.xyz", "", "is nothing that dtrain recognises"),
        ("x.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "pairs of answers"),
        ("x.csv", "a,b\n1,2\n1,2\n", "without a column to predict from others"),
        ("x.csv", "a\n1\n2\n", "without a column to predict from others"),
        ("x.csv", "", "cannot be read as a table"),
        (".", None, "is nothing that dtrain recognises"),
        ("missing.csv", None, "does not exist"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        readings(tmp_path / name)


def test_a_misspelt_name_gets_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name, hint in (("photo", f"did you mean {tmp_path / 'photos'}?"), ("else", "")):
        with pytest.raises(DataError, match="does not exist") as error:
            readings(tmp_path / name)
        assert (error.value.hint or "") == hint


def test_pictures_whose_classes_can_be_two_things_are_refused_with_both(tmp_path: Path) -> None:
    for city in ("bonn", "lyon"):
        pictures(tmp_path / "photos" / city, {"cat": 2, "dog": 2})
    with pytest.raises(DataError, match="the classes can be the former or the latter"):
        readings(tmp_path / "photos")


def test_what_is_wrong_with_arrays_of_usual_names_is_said(tmp_path: Path) -> None:
    def refused(**arrays: np.ndarray) -> str:
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(DataError) as error:
            readings(tmp_path / "a.npz")
        return f"{error.value.message} {error.value.hint}"

    pictures = np.zeros((40, 3, 12, 12), np.float32)
    assert "first dims of its arrays differ" in refused(image=pictures, label=np.zeros(39, np.int64))
    assert "label[:, 0]" in refused(image=pictures, label=np.zeros((40, 1), np.int64))
    assert "label.argmax(1)" in refused(image=pictures, label=np.eye(40))
    np.savez(tmp_path / "a.npz", image=pictures, label=np.arange(40) % 2)
    ((_, guess),) = readings(tmp_path / "a.npz")
    assert "image.transpose(0, 2, 3, 1)" in guess.notes[0]


def test_arrays_of_unknown_names_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", foo=np.zeros(3), bar=np.zeros(3))
    with pytest.raises(DataError, match=r"foo \[3\], bar \[3\]"):
        readings(tmp_path / "a.npz")


def test_arrays_for_testing_texts_and_arrays_of_other_lengths_are_seen(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    names = np.array(["cat", "dog"])
    own = {f"{kind}_{split}": value for split, count in (("train", 40), ("test", 10)) for kind, value in (
        ("x", draw.random((count, 8, 8, 1), np.float32)), ("y", names[np.arange(count) % 2]))}  # fmt: skip
    np.savez(tmp_path / "a.npz", **own, mean=np.zeros(64))
    ((kind, guess),) = selected(tmp_path / "a.npz")
    assert guess.section["test_names"] == {"x_test": "image", "y_test": "label"}
    data = part(Data, {"kind": kind, **guess.section}, "data")
    train, test = data.open("train"), data.open("test")
    assert (len(train), len(test), train.class_names) == (40, 10, ("cat", "dog"))
    np.testing.assert_array_equal(test.rows(np.arange(10))["label"], np.arange(10) % 2)
    np.testing.assert_array_equal(test.rows(np.arange(10))["image"], own["x_test"])
    assert (test.place(3), test.origin_of(3)) == (f"{tmp_path}/a.npz: row 4", {"row": 4})
    assert "without mean" in new_recipe(tmp_path / "a.npz", kind, guess).text
    with pytest.raises(DataError, match=r"the first dims of its arrays differ: .*\n?.*data.arrays=\[image, label\]"):
        part(Data, {"kind": "npz", "file": str(tmp_path / "a.npz")}, "data").open("train")
    with pytest.raises(DataError, match="has no array 'z'"):
        part(Data, {"kind": "npz", "file": str(tmp_path / "a.npz"), "arrays": ["z"]}, "data").open("train")

    np.savez(tmp_path / "two.npz", x=draw.random((40, 3)), age=np.arange(40) % 7, klass=np.arange(40) % 2)
    assert [guess.label for _, guess in selected(tmp_path / "two.npz")] == ["age", "klass"]
    ((_, guess),) = selected(tmp_path / "two.npz", label="age")
    assert (guess.section["arrays"], guess.section["names"]) == (["x", "age"], {"x": "features", "age": "label"})


@pytest.mark.slow
def test_from_a_table_to_predictions_in_two_commands(dtrain: Dtrain, tmp_path: Path) -> None:
    table(tmp_path / "homes.csv", rows=300)
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')\n")  # beside the data
    done = dtrain("new", "homes.csv", "--run")
    assert "a table of 300 rows" in done.stderr
    assert "finished with mae" in done.stdout + done.stderr
    done = dtrain("predict", "homes", "homes.csv")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 300
    error = np.mean([abs(row["value"] - row["label"]) for row in rows])
    assert f"mean absolute error {error:.4g} of 300 rows with a label" in done.stderr
    again = dtrain("new", "homes.csv", code=2)
    assert "homes.yaml already exists" in again.stderr


def test_a_recipe_in_another_folder_finds_the_data(dtrain: Dtrain, tmp_path: Path) -> None:
    text(tmp_path / "book.txt")
    (tmp_path / "recipes").mkdir()
    dtrain("new", "book.txt", "--out", "recipes/mine.yaml")
    recipe = load(tmp_path / "recipes/mine.yaml")
    assert recipe.name == "mine"
    assert recipe.data.files == (f"{tmp_path}/book.txt",)


@pytest.mark.nightly
def test_data_that_can_be_several_is_asked_about_on_a_terminal_and_refused_elsewhere(
    dtrain: Dtrain, tmp_path: Path
) -> None:
    table(tmp_path / "homes.csv", label="worth")
    refused = dtrain("new", "homes.csv", code=2)
    assert "can be read in 3 ways; say which:" in refused.stderr
    assert "--label worth" in refused.stderr
    lead, follow = pty.openpty()
    command = [sys.executable, "-m", "dtrain", "new", "homes.csv"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=follow, stdout=follow, stderr=follow) as process:
        os.write(lead, b"3\n")
        assert process.wait(60) == 0
    assert "label: worth" in (tmp_path / "homes.yaml").read_text()
    (tmp_path / "homes.yaml").unlink()
    with subprocess.Popen(command, cwd=tmp_path, stdin=follow, stdout=follow, stderr=follow) as process:
        os.write(lead, b"\x04")  # Ctrl-D
        assert process.wait(60) == 130
    os.close(follow)
    assert b"Traceback" not in os.read(lead, 100_000)
    os.close(lead)
    assert not (tmp_path / "homes.yaml").exists()
