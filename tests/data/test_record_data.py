"""Records with columns: every form of file gives the same examples, and nothing of a file is used or dropped unseen."""

import io
import json
import os
import pickle
import re
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from dtrain.core.errors import DataError, FieldError
from dtrain.data import record_data
from dtrain.data.batch import ROW, Feature
from dtrain.data.batches import TrainBatches, stream
from dtrain.data.columns import AnyColumn, ArrayColumn, ImageColumn, LabelColumn, NumberColumn, TokensColumn
from dtrain.data.data_check import DataCheck
from dtrain.data.pixels import Pixels
from dtrain.data.prediction_inputs import inputs, records_given, texts_given
from dtrain.data.record_data import Records
from dtrain.data.source import Load
from tests.data.test_records import tar_of

COUNT = 40
RNG = np.random.default_rng(0)
PICTURES = [RNG.integers(0, 256, (6, 8, 3), np.uint8) for _ in range(COUNT)]
TEXTS = [f"picture {i} of a {'cat' if i % 3 else 'dog'}" for i in range(COUNT)]
LABELS = [str(9 + i % 3) for i in range(COUNT)]
VECTORS = [[i / 8, -float(i)] for i in range(COUNT)]


def png(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def lines(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write(folder: Path, form: str) -> tuple[list[str], dict[str, str]]:
    """Write the records in a form: the files, and the fields of picture, text and label."""
    contents = [png(picture) for picture in PICTURES]
    if form == "lines":
        (folder / "p").mkdir()
        for i, content in enumerate(contents):
            (folder / f"p/{i}.png").write_bytes(content)
        rows = [
            {"file": f"p/{i}.png", "text": TEXTS[i], "cls": int(LABELS[i]), "vector": VECTORS[i], "score": i / 4}
            for i in range(COUNT)
        ]
        half = COUNT // 2
        lines(folder, rows[:half], "a.jsonl")
        lines(folder, rows[half:], "b.jsonl")
        return [str(folder / "?.jsonl")], {"image": "file"}
    if form == "parquet":
        image = [{"bytes": content, "path": None} for content in contents]
        score = [i / 4 for i in range(COUNT)]
        table = {"image": image, "text": TEXTS, "cls": LABELS, "vector": VECTORS, "score": score}
        pyarrow.parquet.write_table(pyarrow.table(table), folder / "rows.parquet", row_group_size=7)
        return [str(folder / "rows.parquet")], {}
    if form in ("tar", "tar.gz"):
        members = {}
        for i, content in enumerate(contents):
            vector = io.BytesIO()
            np.save(vector, np.array(VECTORS[i]))
            own = {
                "png": content,
                "txt": TEXTS[i].encode(),
                "cls": LABELS[i].encode() + b"\n",
                "npy": vector.getvalue(),
            }
            members |= {f"x/{i:03}.{suffix}": value for suffix, value in own.items()}
            members[f"x/{i:03}.json"] = json.dumps({"score": i / 4}).encode()
        tar_of(folder / f"rows.{form}", members, "w:gz" if form == "tar.gz" else "w")
        return [str(folder / f"rows.{form}")], {"image": "png", "vector": "npy"}
    for i, content in enumerate(contents):
        (folder / f"{i:03}.png").write_bytes(content)
        (folder / f"{i:03}.txt").write_text(TEXTS[i] + "\n")
        own = {"cls": LABELS[i], "vector": VECTORS[i], "score": i / 4}
        (folder / f"{i:03}.json").write_text(json.dumps(own))
    return [str(folder)], {}


def columns(fields: dict[str, str] | None = None) -> dict[str, AnyColumn]:
    named = {"label": "cls", "text": "text"} | (fields or {})
    return {
        "image": ImageColumn(size=(6, 8), field=named.get("image")),
        "text": TokensColumn(length=24, field="text"),
        "label": LabelColumn(field="cls"),
        "score": NumberColumn(),
        "vector": ArrayColumn(shape=(2,), field=named.get("vector")),
    }


def only(name: str = "n", **column: Any) -> dict[str, AnyColumn]:
    return {name: NumberColumn(**column)}


@pytest.mark.parametrize("form", ["lines", "parquet", "tar", "tar.gz", "folder"])
def test_every_form_gives_the_same_examples(tmp_path: Path, form: str) -> None:
    files, fields = write(tmp_path, form)
    data = Records(files=tuple(files), columns=columns(fields), test=0.3, cache=str(tmp_path / "cache"))
    train, test = data.open("train"), data.open("test")
    assert len(train) + len(test) == COUNT
    assert 4 <= len(test) <= 20
    assert train.class_names == ("9", "10", "11")
    seen = []
    for source in (train, test):
        assert source.example["image"] == Feature((6, 8, 3), "uint8")
        assert source.example["text"] == Feature((24,), "int32", 256)
        assert source.example["label"] == Feature((), "int32", 3)
        batch = source.rows(np.arange(len(source)))
        assert {name: (values.shape[1:], str(values.dtype)) for name, values in batch.items()} == {
            name: (feature.shape, feature.dtype) for name, feature in source.example.items()
        }
        for row in range(len(source)):
            text = bytes(batch["text"][row].tolist()).rstrip(b"\0").decode()
            assert source.text_of("text", batch["text"][row]) == text
            index = TEXTS.index(text)
            seen.append(index)
            np.testing.assert_array_equal(batch["image"][row], PICTURES[index])
            assert train.class_names[batch["label"][row]] == LABELS[index]
            assert batch["score"][row] == index / 4
            np.testing.assert_array_equal(batch["vector"][row], VECTORS[index])
    assert sorted(seen) == list(range(COUNT))
    order = np.array([3, 0, 3, len(train) - 1])
    again = pickle.loads(pickle.dumps(train)).rows(order)
    for name, values in train.rows(order).items():
        np.testing.assert_array_equal(values, again[name])
    assert data.open("train").fingerprint == train.fingerprint != test.fingerprint


def test_worker_processes_give_the_same_batches(tmp_path: Path) -> None:
    files, fields = write(tmp_path, "tar")
    source = Records(files=tuple(files), columns=columns(fields), cache=str(tmp_path / "cache")).open("train")
    batches = TrainBatches(source, source.order(0, 4), 4, np.arange(4), 0, 3, keyed=False)
    for own, other in zip(stream(batches, Load()), stream(batches, Load(workers=1)), strict=True):
        for name in own:
            np.testing.assert_array_equal(own[name], other[name])


def test_records_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, fields = write(tmp_path, "lines")
    data = Records(files=tuple(files), columns=columns(fields), cache=str(tmp_path / "cache"))
    before = data.open("train")
    read: list[Path] = []
    real = record_data.records
    monkeypatch.setattr(record_data, "records", lambda path, *rest: (read.append(path), real(path, *rest))[1])
    assert data.open("train").fingerprint == before.fingerprint
    assert not read
    # a row that is added changes one file, and that one alone is read again
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write(json.dumps({"file": "p/0.png", "text": "new", "cls": 9, "vector": [0, 0], "score": 1}) + "\n")
    assert data.open("train").fingerprint != before.fingerprint
    assert read == [tmp_path / "b.jsonl"]
    # damage of what is kept is found, and it is made again
    for kept in (tmp_path / "cache/records").glob("*/column-3.bin"):
        kept.write_bytes(bytes(kept.stat().st_size))
    read.clear()
    assert len(data.open("train")) + len(data.open("test")) == COUNT + 1
    assert len(read) == 2


def test_records_of_one_picture_are_in_one_split(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}.png").write_bytes(png(PICTURES[i]))
    path = lines(tmp_path, [{"image": f"{'./' * (i // 20 % 2)}{i % 20}.png", "n": i, "who": i % 7} for i in range(100)])
    data = {"files": (str(path),), "cache": str(tmp_path / "cache"), "test": 0.4}
    both: dict[str, AnyColumn] = {"image": ImageColumn(size=(6, 8)), "n": NumberColumn()}

    def numbers(data: Records) -> list[set[int]]:
        return [
            set(source.rows(np.arange(len(source)))["n"].astype(int).tolist())
            for source in (data.open("train"), data.open("test"))
        ]

    train, test = numbers(Records(columns=both, **data))
    assert train and test and not {n % 20 for n in train} & {n % 20 for n in test}
    train, test = numbers(Records(columns=both, group="who", **data))
    assert train and test and not {n % 7 for n in train} & {n % 7 for n in test}
    # a record that is added in front moves no other to the other split
    more = lines(tmp_path, [{"n": -1.0}] + [{"n": i} for i in range(100)], "more.jsonl")
    few = lines(tmp_path, [{"n": i} for i in range(100)], "few.jsonl")
    splits = [numbers(Records(**{**data, "files": (str(one),)}, columns=only())) for one in (few, more)]
    assert splits[0][0] <= splits[1][0] and splits[0][1] <= splits[1][1]


BAD: list[tuple[dict[str, Any], AnyColumn, str]] = [
    ({}, NumberColumn(), "x is missing; it has ok"),
    ({"x": None}, NumberColumn(), "x is null"),
    ({"x": "three"}, NumberColumn(), "x is no number: 'three'"),
    ({"x": True}, NumberColumn(), "x is bool, no number"),
    ({"x": 1e300}, NumberColumn(), "too large for float32"),
    ({"x": 5}, TokensColumn(length=4), "x is int, no text"),
    ({"x": "hello"}, TokensColumn(length=4), "x has 5 tokens, more than length: 4; cut: true cuts it"),
    ({"x": "a\0b"}, TokensColumn(length=4), "has the token 0, which fills rows, in its text"),
    ({"x": [1, 2]}, ArrayColumn(shape=(3,)), "x has the shape [2], not [3]"),
    ({"x": [[1], [1, 2]]}, ArrayColumn(shape=(2,)), "x is no array"),
    ({"x": [1.5]}, ArrayColumn(shape=(1,), dtype="int32"), "x has values that are no int32"),
    ({"x": [256]}, ArrayColumn(shape=(1,), dtype="uint8"), "x has values that are no uint8"),
    ({"x": ["a"]}, ArrayColumn(shape=(1,)), "x has values that are no numbers"),
    ({"x": 1.5}, LabelColumn(), "x is float: expected a text or a whole number"),
    ({"x": 7}, ImageColumn(size=(2, 2)), "x is no picture"),
    ({"x": 16777217}, NumberColumn(), "float32 does not hold exactly"),
    ({"x": 2**53 + 1}, NumberColumn(), "float32 does not hold exactly"),
    ({"x": 2**70}, NumberColumn(), "float32 does not hold exactly"),
    ({"x": "1_000"}, NumberColumn(), "x is no number: '1_000'"),
    ({"x": " "}, LabelColumn(), "x is empty"),
    ({"x": True}, LabelColumn(), "x is bool: expected a text or a whole number"),
    ({"x": "A" * 2000}, ImageColumn(size=(2, 2)), "x is no file name, but a text of 2,000 characters"),
    ({"x": "A" * 300}, ImageColumn(size=(2, 2)), "AAA: does not exist"),
    ({"x": "https://a.b/c.png"}, ImageColumn(size=(2, 2)), "x is an address, https://a.b/c.png"),
    ({"x": "none.png"}, ImageColumn(size=(2, 2)), "none.png: does not exist"),
    ({"x": "rows.jsonl"}, ImageColumn(size=(2, 2)), "rows.jsonl: cannot be read as an image"),
]


@pytest.mark.parametrize(("fields", "column", "message"), BAD)
def test_an_unfit_value_is_refused_or_left_out(
    tmp_path: Path, fields: dict[str, Any], column: AnyColumn, message: str
) -> None:
    for i in range(12):
        (tmp_path / f"{i}.png").write_bytes(png(PICTURES[i]))
    good = {
        NumberColumn: [i / 2 for i in range(12)],
        TokensColumn: [str(i) for i in range(12)],
        ArrayColumn: [[0] * (column.shape[0] if isinstance(column, ArrayColumn) else 0)] * 12,
        LabelColumn: [i % 2 for i in range(12)],
        ImageColumn: [f"{i}.png" for i in range(12)],
    }[type(column)]
    rows: list[dict[str, Any]] = [{"ok": i, "x": value} for i, value in enumerate(good)]
    path = lines(tmp_path, [*rows, {"ok": 1, **fields}])
    where = {"files": (str(path),), "cache": str(tmp_path / "cache"), "test": 0.4}
    named: dict[str, AnyColumn] = {"x": column, "ok": NumberColumn()}
    with pytest.raises(DataError) as raised:
        for split in ("train", "test"):
            Records(columns=named, **where).open(split)
    assert message in raised.value.message
    assert "data.broken: leave_out" in raised.value.hint
    data = Records(columns=named, broken="leave_out", **where)
    train, test = data.open("train"), data.open("test")
    assert len(train) + len(test) == len(rows)
    assert any(" are left out; the first: " in note and message in note for note in (*train.notes, *test.notes))
    check = DataCheck()
    Records(columns=named, **where).inspect(check)
    assert [error.message for _, error in check.problems] == [raised.value.message]


def test_many_broken_records_are_counted(tmp_path: Path) -> None:
    path = lines(tmp_path, [{"x": i} for i in range(30)])
    with pytest.raises(DataError) as raised:
        Records(files=(str(path),), columns=only(), cache=str(tmp_path / "cache")).open("train")
    assert raised.value.message.startswith(f"30 records cannot be used:\n  {path}:1: n is missing; it has x\n")
    assert raised.value.message.endswith("\n  and 10 more")


def test_what_is_not_used_is_named(tmp_path: Path) -> None:
    folder, cache = tmp_path / "pictures", str(tmp_path / "cache")
    folder.mkdir()
    (folder / "notes.md").write_text("x")
    write(folder, "folder")
    picture: dict[str, AnyColumn] = {"image": ImageColumn(size=(6, 8))}
    source = Records(files=(str(folder),), columns=picture, cache=cache).open("train")
    assert "fields that no column uses: cls, folder, score, text, vector" in source.notes
    assert "files left out: 1 .md" in source.notes
    path = lines(folder, [{"image": f"{i:03}.png", "text": "left of a cat", "n": i} for i in range(COUNT)])
    data = Records(
        files=(str(path),),
        columns=picture | {"text": TokensColumn(length=8, cut=True)},
        pixels=Pixels(flip=True),
        cache=cache,
    )
    notes = data.open("train").notes
    count = len(data.open("train"))
    assert (
        f"{count} of {count} texts of text name left or right: data.pixels.flip mirrors their pictures all the same"
        in notes
    )
    assert f"text: {COUNT} of all records are cut to 8 tokens" in notes
    assert "fields that no column uses: n" in notes


def test_pictures_that_change_are_noticed(tmp_path: Path) -> None:
    for form in ("lines", "tar"):
        folder = tmp_path / form
        folder.mkdir()
        files, fields = write(folder, form)
        data = Records(files=tuple(files), columns=columns(fields), cache=str(tmp_path / "cache"))
        source, first = data.open("train"), data.open("train").fingerprint
        changed = Path(source.place(0)) if form == "lines" else folder / "rows.tar"
        content = changed.read_bytes()
        other = png(PICTURES[1] if content == png(PICTURES[0]) else PICTURES[0]) if form == "lines" else content + b"\0"
        changed.write_bytes(other)
        with pytest.raises(DataError, match="modified or replaced"):
            source.rows(np.arange(1))
        assert bool(source.changed()) == (form == "tar")
        if form == "lines":
            assert data.open("train").fingerprint != first


def test_how_a_picture_is_decoded_is_in_the_fingerprint_and_reads_no_record_again(tmp_path: Path) -> None:
    files, fields = write(tmp_path, "parquet")
    made = {}
    for size in ((6, 8), (3, 4)):
        image: dict[str, AnyColumn] = {"image": ImageColumn(size=size, field=fields.get("image"), channels=1)}
        source = Records(files=tuple(files), columns=image, cache=str(tmp_path / "cache")).open("train")
        assert source.rows(np.arange(2))["image"].shape == (2, *size, 1)
        made[size] = source.fingerprint
    assert len(set(made.values())) == 2
    assert len(list((tmp_path / "cache/records").glob("*/about.json"))) == 1


def test_pictures_of_a_record_are_augmented_alike() -> None:
    data = Records(
        files=("x",),
        columns={"image": ImageColumn(size=(6, 8)), "mask": ImageColumn(size=(6, 8), channels=1)},
        pixels=Pixels(flip=True, crop=2, resized_crop=0.5),
    )
    assert data.needs_row_numbers
    image = np.stack(PICTURES[:16])
    batch = {"image": image, "mask": image[..., :1], "other": np.arange(16.0), ROW: np.arange(16, dtype=np.uint32)}
    prepared = data.prepare(batch, jax.random.key(0), True)
    np.testing.assert_allclose(prepared["image"][..., :1], prepared["mask"], atol=1e-6)
    assert not np.allclose(prepared["image"], image / 255)
    np.testing.assert_array_equal(prepared["other"], batch["other"])
    plain = data.prepare(batch, jax.random.key(0), False)
    np.testing.assert_allclose(plain["mask"], image[..., :1] / 255, rtol=1e-6)


def test_labels_are_named_or_counted(tmp_path: Path) -> None:
    path = lines(tmp_path, [{"x": text} for text in ("b", "a", "c") * 9])
    where = {"files": (str(path),), "cache": str(tmp_path / "cache"), "test": 0.4}
    column: dict[str, AnyColumn] = {"label": LabelColumn(field="x", classes=("c", "b", "a"))}
    source = Records(columns=column, **where).open("train")
    assert source.class_names == ("c", "b", "a")
    with pytest.raises(DataError, match=r"data\.columns\.label: c is not among the 2 classes"):
        Records(columns={"label": LabelColumn(field="x", classes=("b", "a"))}, **where).open("train")
    numbers = lines(tmp_path, [{"label": 2, "i": i} for i in range(9)], "n.jsonl")
    named: dict[str, AnyColumn] = {"label": LabelColumn(classes=1000), "i": NumberColumn()}
    data = Records(files=(str(numbers),), columns=named, test=0.4, cache=str(tmp_path / "cache"))
    example = data.example()
    assert example is not None and example["label"].values == 1000
    assert set(data.open("train").rows(np.arange(2))["label"].tolist()) == {2}
    assert Records(columns=column, files=("x",)).example() == {"label": Feature((), "int32", 3)}
    assert Records(columns={"label": LabelColumn()}, files=("x",)).example() is None


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"columns": {}}, "columns", "names no column"),
        ({"columns": {"row": NumberColumn()}}, "columns.row", "dtrain adds an array of that name"),
        ({"columns": {"token": NumberColumn()}}, "columns.token", "a language model's tokens"),
        ({"columns": only(), "pixels": Pixels(flip=True)}, "pixels", "no column has pictures"),
        (
            {"columns": {"image": ImageColumn(size=(2, 2)), "n": NumberColumn()}, "pixels": Pixels(mixup=0.2)},
            "pixels",
            "mixup and cutmix mix pictures and labels alone; there is n",
        ),
        (
            {"columns": {"image": ImageColumn(size=(2, 2))}, "pixels": Pixels(smoothing=0.1)},
            "pixels.smoothing",
            "there is no column named label",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(FieldError, match=re.escape(message)) as raised:
        Records(files=("x",), **given)
    assert raised.value.field == field


def test_records_of_other_files_are_inputs(tmp_path: Path) -> None:
    files, fields = write(tmp_path, "lines")
    data = Records(files=tuple(files), columns=columns(fields), cache=str(tmp_path / "cache"))
    example = data.open("train").example
    given = inputs(data, example, files)
    assert given.origins[0] == {"record": f"{tmp_path}/a.jsonl:1", "label": LABELS[0]}
    assert given.origins[4]["label"] == LABELS[4]
    assert set(given.source.example) == {"image", "text", "score", "vector"}
    np.testing.assert_array_equal(given.source.rows(np.array([5]))["image"][0], PICTURES[5])
    prompts = lines(tmp_path, [{"text": "a dog"}, {"text": "a cat"}], "prompts.jsonl")
    given = inputs(data, example, [str(prompts)])
    assert set(given.source.example) == {"text"} and given.origins[1].keys() == {"record"}
    np.testing.assert_array_equal(
        given.source.rows(np.arange(2))["text"], texts_given(data, ["a dog", "a cat"]).rows(np.arange(2))["text"]
    )
    assert len(records_given(data, [{"text": "x", "score": 1}])) == 1
    with pytest.raises(DataError, match="has no field of file, text, cls, score, vector"):
        records_given(data, [{"caption": "x"}])
    pictures = inputs(data, example, [str(tmp_path / "p/0.png")])
    np.testing.assert_array_equal(pictures.source.rows(np.arange(1))["image"][0], PICTURES[0])
    with pytest.raises(DataError, match="half of a character"):
        texts_given(data, ["caf\udce9"])
    with pytest.raises(DataError, match="has no column of tokens"):
        texts_given(Records(files=("x",), columns=only()), ["a"])


def test_each_of_several_files_has_its_own_pictures(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    picture: dict[str, AnyColumn] = {"image": ImageColumn(size=(6, 8), field="png")}
    named: dict[str, AnyColumn] = {"image": ImageColumn(size=(6, 8))}
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        tar_of(tmp_path / f"{name}.tar", {"0.png": png(PICTURES[number])})
        (tmp_path / name / "0.png").write_bytes(png(PICTURES[number]))
        lines(tmp_path / name, [{"image": "0.png"}])
    forms = {
        "tar": (Records(files=("x",), columns=picture, cache=cache), [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar"]),
        "lines": (Records(files=("x",), columns=named, cache=cache), [f"{tmp_path}/{n}/rows.jsonl" for n in "ab"]),
    }
    for data, files in forms.values():
        source, places, _ = data.of_files(files)
        assert len(places) == 2
        np.testing.assert_array_equal(source.rows(np.arange(2))["image"], np.stack(PICTURES[:2]))
    for name in "ab":
        (tmp_path / name / "rows.jsonl").unlink()
    source, _, _ = forms["lines"][0].of_files([f"{tmp_path}/a", f"{tmp_path}/b"])
    np.testing.assert_array_equal(source.rows(np.arange(2))["image"], np.stack(PICTURES[:2]))
    with pytest.raises(DataError, match="record 2: has no text, which other records have"):
        records_given(
            Records(files=("x",), columns={"text": TokensColumn(length=4), "n": NumberColumn()}),
            [{"text": "a", "n": 1}, {"n": 2}],
        )
    with pytest.raises(DataError, match="record 1: is str, not an object"):
        records_given(forms["tar"][0], ["a"])  # pyright: ignore[reportArgumentType]


def test_a_changed_tar_is_another_fingerprint_whatever_the_hash_of_a_split_is(tmp_path: Path) -> None:
    found = set()
    for first in range(2):
        members = {f"{i}.png": png(PICTURES[0]) for i in range(12)}
        members |= {f"{i}.mask.png": png(PICTURES[first]) for i in range(12)}
        members |= {f"{i}.who": str(i % 5).encode() for i in range(12)}
        length = max(map(len, (png(PICTURES[0]), png(PICTURES[1]))))
        members = {name: value.ljust(length, b"\0") if "png" in name else value for name, value in members.items()}
        tar_of(tmp_path / "a.tar", dict(sorted(members.items())))
        pictures: dict[str, AnyColumn] = {
            "image": ImageColumn(size=(6, 8), field="png"),
            "mask": ImageColumn(size=(6, 8), field="mask.png"),
        }
        data = Records(
            files=(f"{tmp_path}/a.tar",), columns=pictures, group="who", cache=str(tmp_path / "cache"), test=0.4
        )
        found.add(data.open("train").fingerprint)
        who = [set(), set()]
        for number, split in enumerate(("train", "test")):
            source = data.open(split)  # pyright: ignore[reportArgumentType]
            who[number] |= {int(place.rsplit(" ", 1)[1]) for place in map(source.place, range(len(source)))}
        assert who[0] and who[1]
    assert len(found) == 2


def test_a_group_is_its_text_in_every_form(tmp_path: Path) -> None:
    tar_of(tmp_path / "a.tar", {f"{i:02}.{kind}": value for i in range(40) for kind, value in (
        ("json", json.dumps({"n": i}).encode()), ("who", f"{i % 6}\n".encode()))})  # fmt: skip
    whole = lines(tmp_path, [{"n": i, "who": i % 6} for i in range(40)])
    texts = lines(tmp_path, [{"n": i, "who": f"{i % 6}"} for i in range(40)], "texts.jsonl")
    held = []
    for path in (tmp_path / "a.tar", whole, texts):
        data = Records(files=(str(path),), columns=only(), group="who", test=0.5, cache=str(tmp_path / "cache"))
        test = data.open("test")
        held.append(sorted(test.rows(np.arange(len(test)))["n"].tolist()))
    assert held[0] == held[1] == held[2]


def test_the_split_of_a_text_with_a_label_depends_on_it_alone(tmp_path: Path) -> None:
    both: dict[str, AnyColumn] = {"t": TokensColumn(length=8), "label": LabelColumn()}
    rows = [{"t": f"text {i}", "label": f"c{i % 3}"} for i in range(60)]
    held = []
    for number, order in enumerate((rows, rows[::-1], [{"t": "new", "label": "z"}, *rows])):
        path = lines(tmp_path, order, f"{number}.jsonl")
        source = Records(files=(str(path),), columns=both, test=0.5, cache=str(tmp_path / "cache")).open("test")
        held.append({source.text_of("t", row) for row in source.rows(np.arange(len(source)))["t"]} - {"new"})
    assert held[0] == held[1] == held[2]


def test_what_both_splits_leave_out_is_reported(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}.png").write_bytes(png(PICTURES[i]))
    picture: dict[str, AnyColumn] = {"image": ImageColumn(size=(6, 8)), "label": LabelColumn(field="y")}
    rows = [{"image": f"{i}.png", "y": "ghost" if i >= 20 else "a"} for i in range(40)]
    data = Records(
        files=(str(lines(tmp_path, rows)),),
        columns=picture,
        test=0.5,
        broken="leave_out",
        cache=str(tmp_path / "cache"),
    )
    counts = []
    for split in ("train", "test"):
        notes = data.open(split).notes  # pyright: ignore[reportArgumentType]
        counts += [int(note.split()[0]) for note in notes if "records of this split are left out" in note]
        assert "label: no record of ghost in this split" in notes
    assert sum(counts) == 20 and len(counts) == 2


def test_what_is_read_twice_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path, [{"n": i} for i in range(9)])
    copy = lines(tmp_path, [{"n": i} for i in range(9)], "copy.jsonl")
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    twice = Records(files=(str(path), str(link)), columns=only(), cache=str(tmp_path / "cache"), test=0.4)
    assert len(twice.open("train")) + len(twice.open("test")) == 9
    for other in (path, copy, link):
        data = Records(files=(str(path),), test_files=(str(other),), columns=only(), cache=str(tmp_path / "cache"))
        with pytest.raises(DataError, match=r"of data\.test_files has the same content as"):
            data.open("train")
    with pytest.raises(DataError, match=r"data\.files is empty"):
        Records(files=(), columns=only(), cache=str(tmp_path / "cache")).open("train")


def test_files_for_testing_may_name_other_pictures_alike(tmp_path: Path) -> None:
    picture: dict[str, AnyColumn] = {"image": ImageColumn(size=(6, 8))}
    for number, name in enumerate(("train", "test")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(png(PICTURES[number]))
    for lined in (False, True):
        if lined:
            for name in ("train", "test"):
                lines(tmp_path / name, [{"image": "0.png"}])
        where = {"files": (f"{tmp_path}/train",), "cache": str(tmp_path / "cache")}
        data = Records(test_files=(f"{tmp_path}/test",), columns=picture, **where)
        for number, split in enumerate(("train", "test")):
            found = data.open(split).rows(np.arange(1))["image"][0]  # pyright: ignore[reportArgumentType]
            np.testing.assert_array_equal(found, PICTURES[number])
        with pytest.raises(DataError, match="has the same content as"):
            Records(test_files=(f"{tmp_path}/./train",), columns=picture, **where).open("train")


def test_folders_that_are_no_plain_folder_of_pictures(tmp_path: Path) -> None:
    picture: dict[str, AnyColumn] = {"image": ImageColumn(size=(6, 8))}
    folder, other = tmp_path / "one", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    data = Records(files=(str(folder),), columns=picture, cache=str(tmp_path / "cache"))
    for i in range(20):
        (folder / f"{i}.png").write_bytes(png(PICTURES[i]))
        (other / f"{i}.PNG").write_bytes(png(PICTURES[20 + i]))
    (folder / "more").symlink_to(other)
    assert len(data.open("train")) + len(data.open("test")) == 40  # a linked folder is followed
    (folder / "more").unlink()
    (folder / os.fsdecode(b"caf\xe9.png")).write_bytes(png(PICTURES[0]))
    assert len(data.open("train")) + len(data.open("test")) == 21
    for name in ("train", "test"):
        (folder / name).mkdir()
        (folder / name / "x.png").write_bytes(png(PICTURES[0]))
    with pytest.raises(DataError, match="has folders that are called like splits: test, train"):
        data.open("train")
    for name in ("train", "test"):
        lines(folder, [{"image": "1.png"}], f"{name}.jsonl")
    with pytest.raises(DataError, match="has files of several splits: test, train"):
        data.open("train")


def test_names_of_pictures_start_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, folder in enumerate((tmp_path, tmp_path / "in")):
        (folder / "0.png").write_bytes(png(PICTURES[number]))
    picture: dict[str, AnyColumn] = {"image": ImageColumn(size=(6, 8))}
    (tmp_path / "lines").mkdir()
    path = lines(tmp_path / "lines", [{"image": "0.png"}])
    where = {"columns": picture, "test": 0.0, "cache": str(tmp_path / "cache")}
    for root, wanted in ((tmp_path, 0), (tmp_path / "in", 1)):
        source = Records(files=(str(path),), root=str(root), **where).open("train")
        np.testing.assert_array_equal(source.rows(np.arange(1))["image"][0], PICTURES[wanted])
    source = Records(files=(str(tmp_path / "in"),), root=str(tmp_path), **where).open("train")
    np.testing.assert_array_equal(source.rows(np.arange(1))["image"][0], PICTURES[1])


def test_links_hidden_files_and_capitals_in_a_tar(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in {
            "./._0.jpg": b"x", "./0.PNG": png(PICTURES[0]), "./0.TXT": b"\xef\xbb\xbfa dog\r\n",
            "./0.JSON": b'{"n": 1}', "./1.txt": b"a cat", "./1.json": b'{"n": 2}',
        }.items():  # fmt: skip
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("./1.png")
        link.type, link.linkname = tarfile.LNKTYPE, "./0.PNG"
        tar.addfile(link)
    columns: dict[str, AnyColumn] = {
        "image": ImageColumn(size=(6, 8), field="png"),
        "text": TokensColumn(length=8),
        "n": NumberColumn(),
    }
    source = Records(files=(f"{tmp_path}/a.tar",), columns=columns, test=0.0, cache=str(tmp_path / "c")).open("train")
    batch = source.rows(np.arange(2))
    np.testing.assert_array_equal(batch["image"], np.stack([PICTURES[0]] * 2))
    assert [source.text_of("text", row) for row in batch["text"]] == ["a dog", "a cat"]
    assert batch["n"].tolist() == [1, 2]


def test_tokens_around_a_text_and_its_padding(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(("<pad>", "<s>", "</s>", "a", "dog"))}, "<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    path = lines(tmp_path, [{"text": "a dog"}, {"text": "dog dog dog a"}])
    around = {"tokenizer": str(tmp_path / "tokenizer.json"), "length": 5, "begin": "<s>", "end": "</s>", "cut": True}
    where = {"files": (str(path),), "test": 0.0, "cache": str(tmp_path / "cache")}
    source = Records(columns={"text": TokensColumn(pad="<pad>", **around)}, **where).open("train")
    assert source.rows(np.arange(2))["text"].tolist() == [[1, 3, 4, 2, 0], [1, 4, 4, 4, 2]]
    with pytest.raises(DataError, match="names no padding token"):
        Records(columns={"text": TokensColumn(**around)}, **where).open("train")
    with pytest.raises(DataError) as raised:
        Records(columns={"text": TokensColumn(pad="<none>", **around)}, **where).open("train")
    assert raised.value.hint == "see `pad` of the column: a token of the tokenizer, by its text"
    with pytest.raises(FieldError, match="bytes have no such token"):
        TokensColumn(length=4, end="x")


def test_messages_name_the_file_that_is_read(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        path = lines(tmp_path / name, [{"n": "x"}, {"n": 1}])
        with pytest.raises(DataError) as raised:
            Records(files=(str(path),), columns=only(), cache=str(tmp_path / "cache")).open("train")
        assert raised.value.message == f"{path}:1: n is no number: 'x'"


def test_pictures_are_prepared_only_where_there_are_some() -> None:
    data = Records(files=("x",), columns={"image": ImageColumn(size=(2, 2)), "t": TokensColumn(length=2)})
    batch = {"t": np.zeros((1, 2), np.int32)}
    assert set(data.prepare(batch, jax.random.key(0), False)) == {"t"}


def test_files_in_object_storage_are_copied(tmp_path: Path) -> None:
    write(tmp_path, "tar")
    files = fsspec.filesystem("memory")
    files.pipe_file("/bucket-of-records/rows.tar", (tmp_path / "rows.tar").read_bytes())
    (tmp_path / "rows.tar").unlink()
    cache, named = str(tmp_path / "cache"), columns({"image": "png", "vector": "npy"})
    data = Records(files=("memory://bucket-of-records/*.tar",), columns=named, cache=cache)
    source = data.open("train")
    assert len(source) + len(data.open("test")) == COUNT
    assert source.rows(np.arange(1))["image"].shape == (1, 6, 8, 3)
    check = DataCheck()
    data.inspect(check)
    assert check.not_checked == ["data.files: addresses, which the run copies from there"]


def test_two_fields_of_one_name_are_refused(tmp_path: Path) -> None:
    tar_of(tmp_path / "a.tar", {"1.txt": b"a", "1.json": b'{"text": "b"}'})
    data = Records(
        files=(str(tmp_path / "a.tar"),), columns={"text": TokensColumn(length=4)}, cache=str(tmp_path / "c")
    )
    with pytest.raises(DataError, match="its record has a field 'text' already"):
        data.open("train")
    (tmp_path / "1.png").write_bytes(png(PICTURES[0]))
    (tmp_path / "1.json").write_text('{"image": "x"}')
    (tmp_path / "a.tar").unlink()
    picture: dict[str, AnyColumn] = {"image": ImageColumn(size=(2, 2))}
    with pytest.raises(DataError, match=r"1.png has a field 'image' already"):
        Records(files=(str(tmp_path),), columns=picture, cache=str(tmp_path / "c")).open("train")
