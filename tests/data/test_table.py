"""Tables, .npz files and sources of grain: the same rows from every format, and what is no number is refused."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.feather
import pyarrow.json
import pyarrow.parquet
import pytest

from dtrain.core.errors import DataError, RecipeError
from dtrain.data.custom import CustomData
from dtrain.data.npz import Npz
from dtrain.data.prediction_inputs import inputs
from dtrain.data.table import Table
from dtrain.data.table_guess import table_guesses
from dtrain.recipe.new import selected
from tests.conftest import Dtrain


def rows_of(source: Any) -> dict[str, np.ndarray]:
    return source.rows(np.arange(len(source)))


@pytest.fixture
def table() -> pyarrow.Table:
    draw = np.random.default_rng(0)
    size, weight = draw.normal(10, 3, 200), draw.integers(0, 1000, 200)
    kind = np.where(size * 50 + weight > 1000, "large", "small")
    return pyarrow.table({"size": size, "weight": weight, "kind": kind, "hot": draw.random(200) < 0.5})


def write(table: pyarrow.Table, path: Path) -> Path:
    if path.suffix in (".csv", ".tsv"):
        delimiter = "\t" if path.suffix == ".tsv" else ","
        pyarrow.csv.write_csv(table, path, pyarrow.csv.WriteOptions(delimiter=delimiter))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        pyarrow.feather.write_feather(table, path)
    return path


def test_every_format_gives_the_same_rows(table: pyarrow.Table, tmp_path: Path) -> None:
    found = {}
    for suffix in ("csv", "tsv", "jsonl", "parquet", "feather", "arrow"):
        path = write(table, tmp_path / f"t.{suffix}")
        found[suffix] = Table(files=(str(path),), label="kind").open("train")
    first = rows_of(found["parquet"])
    for source in found.values():
        for name, values in rows_of(source).items():
            np.testing.assert_allclose(values, first[name], rtol=1e-6)
    assert found["csv"].class_names == ("large", "small")
    assert first["features"].shape == (len(first["label"]), 3)
    np.testing.assert_allclose(first["features"].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(first["features"].std(0), 1, rtol=1e-4)
    assert len({source.fingerprint for source in (found["csv"], found["jsonl"])}) == 1


def test_the_split_is_of_the_rows_and_the_scale_of_the_training_rows(table: pyarrow.Table, tmp_path: Path) -> None:
    path = write(table, tmp_path / "t.parquet")
    data = Table(files=(str(path),), label="weight", predict="number", columns=("size",), scale=False, test=0.25)
    train, test = (rows_of(data.open(split)) for split in ("train", "test"))
    assert len(train["label"]) + len(test["label"]) == 200
    assert 30 < len(test["label"]) < 70
    both = np.concatenate([train["features"], test["features"]])[:, 0]
    np.testing.assert_allclose(np.sort(both), np.sort(table["size"].to_numpy()), rtol=1e-6)
    assert train["label"].dtype == np.float32
    scaled = Table(files=(str(path),), label="weight", predict="number", columns=("size",), test=0.25).open("test")
    mean, deviation = train["features"].mean(), train["features"].std()
    np.testing.assert_allclose(rows_of(scaled)["features"], (test["features"] - mean) / deviation, rtol=1e-4, atol=1e-5)
    other = write(table.slice(0, 50), tmp_path / "test.csv")
    two = Table(files=(str(path),), label="kind", columns=("size",), test_files=(str(other),))
    assert (len(two.open("train")), len(two.open("test"))) == (200, 50)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("a,b\n1,x\n,y\n", {}, "column 'a' has no finite number in line 3"),
        ("a,b\n1,x\nnan,y\n", {}, "column 'a' has no finite number in line 3"),
        ("a,b\n1,x\ninf,y\n", {"missing": "median"}, "column 'a' has no finite number in line 3"),
        ('a,b,c\n1,x,"p\nq"\n,y,r\n', {"columns": ("a",)}, "column 'a' has no finite number in row 2"),
        ("a,b\n" + "".join(f"t{i},x\n" for i in range(99)), {"test": 0.0}, "too many different texts: 'a' (99)"),
        ("a,b\n0 days,x\n[1],y\n", {"test": 1.0}, "no row for the train split"),
        ("a,b\n1,x\n", {"columns": ("c",)}, "has no column 'c'"),
        ("a\n1\n", {}, "has no column 'b'"),
        ("b\nx\ny\n", {}, "has no column besides the label"),
        ("a,b\n1,x\n2\n", {}, "cannot be read as a table"),
        ("", {}, "cannot be read as a table"),
        ("a,b\n1,x\n2,y\n", {"predict": "number", "test": 0.5}, "column 'b' has text, and data.predict is number"),
        ("a,b\n1,x\n", {"test": 1.0}, "no row for the train split"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused(
    tmp_path: Path, text: str, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        for split in ("train", "test"):
            Table(files=(str(tmp_path / "t.csv"),), label="b", **settings).open(split)


@pytest.mark.parametrize("scale", [True, False])
def test_values_that_float32_cannot_hold_are_refused(tmp_path: Path, scale: bool) -> None:
    place = tmp_path / "t.csv"

    def refused(rows: str, **more: Any) -> str:
        place.write_text(f"a,b,y\n{rows}")
        with pytest.raises(DataError) as error:
            Table(files=(str(place),), label="y", scale=scale, test=0.3, **more).open("train")
        return error.value.message

    many = "".join(f"{row},1,{row % 2}\n" for row in range(20))
    if scale:
        assert "column 'b' has a value that float32 cannot hold" in refused(f"{many}1,1e308,0\n1,-1e308,1\n" * 3)
    else:
        assert "column 'b' has a value that float32 cannot hold" in refused(f"{many}1,6.8e38,0\n")
    assert "column 'y' has a value that float32" in refused(f"{many}1,1,1e39\n" * 3, predict="number")
    np.savez(tmp_path / "x.npz", x=np.array([1.0, 1e300] * 8), label=np.arange(16) % 2)
    with pytest.raises(DataError, match="'x' is NaN or infinite in float32"):
        Npz(file=str(tmp_path / "x.npz")).open("train").fingerprint  # noqa: B018
    np.savez(tmp_path / "nan.npz", x=np.array([np.nan, 1.0] * 8), label=np.arange(16) % 2)
    with pytest.raises(DataError, match="8 rows of 'x' with NaN or infinite numbers, the first is row 0"):
        Npz(file=str(tmp_path / "nan.npz")).open("train")


def test_tables_that_pandas_writes_by_accident_are_refused_with_the_column(tmp_path: Path) -> None:
    def opened(name: str, content: str, *others: str) -> Any:
        (tmp_path / name).write_text(content)
        return Table(files=(str(tmp_path / name), *others), label="y", test=0.3).open("train")

    with pytest.raises(DataError, match="two columns are named 'a'"):
        opened("twice.csv", "a,a,y\n1,2,0\n3,4,1\n")
    with pytest.raises(DataError, match=r"column 'a': cannot be read: Integer value 9007199254740993"):
        opened("wide.csv", "a,y\n9007199254740993,0\n3,1\n")
    with pytest.raises(DataError, match="column 'y' has no value in line 3"):
        opened("empty.csv", "a,y\n1,yes\n2,\n3,no\n")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1.0], "y": [[1, 2]]}), tmp_path / "list.parquet")
    with pytest.raises(DataError, match=r"column 'y' has values of type list<.*neither text nor numbers"):
        Table(files=(str(tmp_path / "list.parquet"),), label="y").open("train")
    (tmp_path / "text.csv").write_text("".join(["a,y\n", *(f"{row},unknown\n" for row in range(9))]))
    mixed = opened(
        "numbers.csv", "".join(["a,y\n", *(f"{row},{row % 2}\n" for row in range(9))]), str(tmp_path / "text.csv")
    )
    assert mixed.class_names == ("0", "1", "unknown")


def test_arrays_of_a_file_are_features_by_name(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.random((100, 4)), draw.integers(0, 3, 100)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    data = Npz(file=str(tmp_path / "a.npz"), names={"y": "label"}, test=0.3)
    train, test = data.open("train"), data.open("test")
    assert len(train) + len(test) == 100
    assert train.example["label"].values == 3
    found = np.concatenate([rows_of(train)["x"], rows_of(test)["x"]])
    np.testing.assert_allclose(np.sort(found, 0), np.sort(x, 0), rtol=1e-6)
    split = Npz(file=str(tmp_path / "a.npz"), names={"y": "label"}, test_file=str(tmp_path / "a.npz"), classes=5)
    assert not data.open("train").notes
    assert split.open("train").notes == ["no example of 3, 4, of the 5 classes of `label`"]
    assert (len(split.open("train")), len(split.open("test"))) == (100, 100)
    assert split.open("test").example["label"].values == 5


@pytest.mark.parametrize(
    ("arrays", "settings", "message"),
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, {}, "the first dims of its arrays differ: x [3, 2], y [4]"),
        ({"x": np.zeros(())}, {}, "the first dims of its arrays differ"),
        ({"x": np.array([{}, {}])}, {}, "cannot be read as .npz"),
        ({"x": np.zeros((9, 2))}, {"names": {"z": "label"}}, "has no array 'z'"),
        ({"x": np.array(["a"] * 9)}, {}, "return numbers"),
    ],
)
def test_what_are_no_arrays_of_examples_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], settings: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError) as caught:
        Npz(file=str(tmp_path / "a.npz"), **settings).open("train")
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_a_dataset_of_grain_is_read_as_it_is() -> None:
    source = CustomData(target="tests.data.user_rows:of_grain", classes=4).open("train")
    found = source.rows(np.array([3, 17]))
    np.testing.assert_allclose(found["image"][:, 0, 0, 0], [3 / 40, 17 / 40])
    assert found["label"].tolist() == [3, 1]
    assert source.example["label"].values == 4
    with pytest.raises(DataError, match="it has 'label', but no classes"):
        CustomData(target="tests.data.user_rows:of_grain").open("train")


@pytest.mark.nightly
def test_a_table_is_trained_on_and_new_rows_are_predicted(dtrain: Dtrain, tmp_path: Path, table: pyarrow.Table) -> None:
    write(table, tmp_path / "t.csv")
    (tmp_path / "t.yaml").write_text(
        "model: {kind: mlp, sizes: [3, 32, 2]}\ndata: {kind: table, files: t.csv, label: kind, test: 0.2}\n"
        "optimizer: {kind: adamw, lr: 0.01}\nbatch: 32\nepochs: 40\n"
    )
    assert "its data" in dtrain("check", "t.yaml").stderr
    dtrain("run", "t.yaml")
    found = json.loads(dtrain("evaluate", "runs/t", "--json").stdout)
    assert found["metrics"]["accuracy"] > 0.9
    assert found["classes"] == ["large", "small"]
    write(table.slice(0, 5).drop_columns(["kind"]), tmp_path / "new.parquet")
    lines = [json.loads(line) for line in dtrain("predict", "runs/t", "new.parquet").stdout.splitlines()]
    assert [line["row"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["class"] for line in lines] == table["kind"].to_pylist()[:5]
    assert "did you mean 'label'?" in dtrain("check", "t.yaml", "data.labell=x", code=2).stderr
    assert (
        "sizes begins with 3; the data's rows have 1 columns"
        in dtrain("check", "t.yaml", "data.columns=[size]", code=2).stderr
    )

    (tmp_path / "my_net.py").write_text(
        "import jax\nfrom dtrain import layers\n\n\nclass Net:\n    loss_of = layers.regress\n\n"
        "    def init(self, key, example):\n        return jax.random.normal(key, (2, 1)) * 0.1\n\n"
        "    def outputs(self, params, batch, ctx):\n        return batch['features'] @ params\n"
    )
    own = ["model={kind: custom, target: 'my_net:Net'}", "data.label=weight", "data.predict=number"]
    done = dtrain("run", "t.yaml", *own, "data.columns=[size, hot]", "name=own")
    assert "mae" in done.stderr
    rows = [json.loads(line) for line in dtrain("predict", "runs/own").stdout.splitlines()]
    assert rows[0].keys() == {"row", "kind", "label", "value"}


PEOPLE = """id,age,town,joined,member,left,pay
1,30,Bern,2024-01-01,true,,high
2,,Basel,2024-01-11,false,,low
3,50,,2024-01-21,true,,high
4,40,Bern,2024-01-31,false,,low
"""
NAMES = ("age", "town", "joined", "member")


def people(folder: Path, **settings: Any) -> Table:
    (folder / "people.csv").write_text(PEOPLE)
    settings = {"columns": NAMES, "missing": "median", "test": 0.0, "scale": False} | settings
    return Table(files=(str(folder / "people.csv"),), label="pay", **settings)


def test_gaps_texts_dates_and_truth_values_become_numbers(tmp_path: Path) -> None:
    source = people(tmp_path).open("train")
    days = 19_723.0  # 2024-01-01
    np.testing.assert_array_equal(
        rows_of(source)["features"],
        # age and whether it is missing; town: none, Basel, Bern; joined; member
        [[30, 0, 0, 0, 1, days, 1], [40, 1, 0, 1, 0, days + 10, 0],
         [50, 0, 1, 0, 0, days + 20, 1], [40, 0, 0, 0, 1, days + 30, 0]],
    )  # fmt: skip
    assert list(source.notes) == [
        "4 rows: high 2, low 2",
        "columns of texts, each text a column: town (2 and empty cells)",
        "column 'age': 1 value is missing, 40, the median of the training rows, in their place",
        "columns left out: id, left",
    ]


def test_all_faults_of_a_file_are_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        people(tmp_path, missing="refuse", columns=(*NAMES, "left")).open("train")
    first, second = refused.value.message.splitlines()
    assert first.endswith("column 'age' has no finite number in line 3")
    assert second.endswith("column 'left' has no finite number in lines 2, 3, 4, 5")
    assert "data.missing: median" in refused.value.hint


def test_what_the_training_rows_do_not_have_is_no_category(tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("id,age,town,joined,member,pay\n9,,Chur,2024-01-01,true,low\n")
    data = people(tmp_path, test_files=(str(tmp_path / "new.csv"),))
    assert rows_of(data.open("test"))["features"].tolist() == [[40, 1, 0, 0, 0, 19_723, 1]]
    assert data.open("test").notes[1] == "column 'town': 1 row has 'Chur', which no training row has: none of its texts"
    rows = data.unlabelled([str(tmp_path / "new.csv")])
    assert rows_of(rows)["features"].tolist() == [[40, 1, 0, 0, 0, 19_723, 1]]
    assert rows.origin_of(0) == {"row": 1, "id": 9, "label": "low"}


def test_a_table_of_numbers_is_read_as_before(table: pyarrow.Table, tmp_path: Path) -> None:
    path = write(table, tmp_path / "t.csv")
    plain, median = (Table(files=(str(path),), label="kind", missing=how).open("train") for how in ("refuse", "median"))
    assert plain.fingerprint == median.fingerprint


@pytest.mark.parametrize("texts", [("1,000", "2,500"), ("50%", "7%"), ("$3", "$4.50")])
def test_numbers_written_as_texts_are_no_categories(tmp_path: Path, texts: tuple[str, str]) -> None:
    (tmp_path / "t.csv").write_text("pay,kind\n" + "".join(f'"{one}",{n % 2}\n' for n, one in enumerate(texts * 2)))
    with pytest.raises(DataError, match="numbers or dates are written as texts in 'pay'"):
        Table(files=(str(tmp_path / "t.csv"),), label="kind").open("train")


def test_codes_with_digits_are_categories(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("version,kind\n1.2.3,0\n1.2.4,1\n1.2.3,1\n1.2.4,0\n")
    assert Table(files=(str(tmp_path / "t.csv"),), label="kind").open("train").notes[1].endswith("version (2)")


def opened_csv(folder: Path, content: str | bytes, **how: Any) -> Any:
    (folder / "t.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    return Table(files=(str(folder / "t.csv"),), **{"label": "y", "scale": False, "test": 0.0} | how).open("train")


def test_labels_with_zeros_before_them_are_classes_of_their_own(tmp_path: Path) -> None:
    assert opened_csv(tmp_path, "a,y\n1,01\n2,1\n3,001\n").class_names == ("001", "01", "1")
    assert opened_csv(tmp_path, "a,y\n1,10\n2,9\n").class_names == ("9", "10")  # numbers in their order
    assert rows_of(opened_csv(tmp_path, "a,y\n1,01\n2,1\n", predict="number"))["label"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["__index_level_0__", "", "id", "PassengerId", "row_id"])
def test_a_column_that_numbers_the_rows_is_left_out_and_named(tmp_path: Path, name: str) -> None:
    source = opened_csv(tmp_path, f"{name},a,y\n1,5,0\n2,5,1\n3,6,0\n")
    assert source.example["features"].shape == (1,)
    assert f"columns left out, which only identify the rows: {name}" in source.notes
    assert opened_csv(tmp_path, f"{name},a,y\n1,5,0\n1,5,1\n3,6,0\n").example["features"].shape == (2,)
    assert opened_csv(tmp_path, f"{name},a,y\n1,5,0\n2,5,1\n", columns=(name, "a")).example["features"].shape == (2,)


def test_csv_of_spreadsheets_in_other_languages(tmp_path: Path) -> None:
    rows = "a;y\n1,5;0\n2,25;1\n"
    assert rows_of(opened_csv(tmp_path, rows))["features"].tolist() == [[1.5], [2.25]]
    assert rows_of(opened_csv(tmp_path, rows.replace(",", ".")))["features"].tolist() == [[1.5], [2.25]]
    assert rows_of(opened_csv(tmp_path, rows.encode("utf-16")))["features"].tolist() == [[1.5], [2.25]]
    assert rows_of(opened_csv(tmp_path, "sep=;\r\n" + rows))["features"].tolist() == [[1.5], [2.25]]
    assert rows_of(opened_csv(tmp_path, "sep=|\n" + rows.replace(";", "|")))["features"].tolist() == [[1.5], [2.25]]
    with pytest.raises(DataError, match="column 'y' is not UTF-8") as refused:
        opened_csv(tmp_path, "a,y\n1,caf\xe9\n2,b\n".encode("latin-1"))
    assert "iconv" in refused.value.hint


def test_texts_that_mean_nothing_are_missing_values_in_every_column(tmp_path: Path) -> None:
    rows = "n;t;d;y\n" + "".join(f"{n},5;{'xy'[n % 2]};{n + 1}.2.2024;{n % 2:02}\n" for n in range(8)) + "-;-;-;-\n"
    (tmp_path / "t.csv").write_text(rows)
    guess = next(guess for guess in table_guesses(tmp_path / "t.csv") if guess.label == "y")
    assert guess.section["missing_texts"] == ["-"]
    assert "columns 1 of numbers, 1 of texts, 1 of dates" in guess.seen
    with pytest.raises(DataError, match=r"column 'y' has no value in line 10"):
        opened_csv(tmp_path, rows, missing_texts=("-",), missing="median")
    read = opened_csv(tmp_path, rows.replace("-\n", "00\n"), missing_texts=("-",), missing="median", scale=False)
    assert read.names_of("features") == ("n", "n is missing", "t=(missing)", "t=x", "t=y", "d", "d is missing")
    assert rows_of(read)["features"][-1].tolist() == [4.0, 1, 1, 0, 0, 19_757.5, 1]
    assert rows_of(read)["label"].tolist() == [0, 1] * 4 + [0]
    with pytest.raises(DataError, match="as texts in 'n'"):
        opened_csv(tmp_path, rows.replace("-\n", "00\n"))


def test_equal_values_are_scaled_to_zero(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("c,a,y\n0.2,1,0\n")
    rows = "c,a,y\n" + "".join(f"0.1,{n},{n % 2}\n" for n in range(10))
    source = opened_csv(tmp_path, rows, scale=True, test_files=(str(tmp_path / "n.csv"),))
    assert not rows_of(source)["features"][:, 0].any()
    held_out = Table(files=(str(tmp_path / "t.csv"),), test_files=(str(tmp_path / "n.csv"),), label="y").open("test")
    assert rows_of(held_out)["features"][0, 0] == pytest.approx(0.1)  # not divided by the deviation of rounding


def test_columns_of_numbers_and_texts_are_refused_with_what_makes_them_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"numbers or dates are written as texts in 'a' \(line 4: '\?'\)") as refused:
        opened_csv(tmp_path, "a,y\n1,0\n2,1\n?,0\n")
    assert "data.missing_texts: ['?'] if ? is nothing" in refused.value.hint
    (tmp_path / "2.csv").write_text("a,y\nx,0\nz,1\n")
    for files in (("t.csv", "2.csv"), ("2.csv", "t.csv")):
        (tmp_path / "t.csv").write_text("a,y\n1,0\n2,1\n")
        with pytest.raises(DataError, match=r"2.csv: column 'a' has texts \(line 2: 'x'\), and numbers or"):
            Table(files=tuple(str(tmp_path / name) for name in files), label="y").open("train")


def test_decimals_of_databases_are_numbers_and_a_label_that_is_none_is_named_with_the_reason(tmp_path: Path) -> None:
    prices = pyarrow.array([Decimal(n) / 4 for n in range(80)], pyarrow.decimal128(8, 2))
    texts = [f"{n},{n} €" for n in range(80)]
    columns = {"price": prices, "text": texts, "same": [1] * 80}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    read = Table(files=(str(tmp_path / "p.parquet"),), label="price", predict="number", columns=("same",)).open("train")
    assert rows_of(read)["label"].max() == 19.75
    for name, why in {
        "text": "numbers or dates written as texts",
        "same": "its values are all the same",
        "no": "no such",
    }.items():
        with pytest.raises(RecipeError, match=why):
            selected(tmp_path / "p.parquet", label=name)


def test_times_are_read_to_the_microsecond_and_further_columns_are_named(tmp_path: Path) -> None:
    times = pyarrow.array([1_700_000_000_123_456_789, 1_700_000_086_400_000_000], pyarrow.timestamp("ns"))
    pyarrow.parquet.write_table(pyarrow.table({"t": times, "y": [0, 1]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"t": times, "y": [0, 1], "more": [1, 2]}), tmp_path / "b.parquet")
    files = tuple(str(tmp_path / name) for name in ("a.parquet", "b.parquet"))
    source = Table(files=files, label="y", scale=False, test=0.0).open("train")
    assert rows_of(source)["features"][0, 0] == pytest.approx(1_700_000_000 / 86_400)
    assert source.notes[-1] == "columns left out: more"


def test_commas_between_thousands_are_not_read_as_decimal_commas(tmp_path: Path) -> None:
    def rows(*numbers: str) -> str:
        return "a;y\n" + "".join(f"{number};{n % 2}\n" for n, number in enumerate(numbers))

    with pytest.raises(DataError, match=r"column 'a' has 2,531, which is 2\.531 with a decimal comma"):
        opened_csv(tmp_path, rows("950", "2,531", "1,000"))
    for fine in (("0,950", "2,531", "1,000"), ("950", "2,5", "1,000"), ("2,531", "1,250", "9,125")):
        source = opened_csv(tmp_path, rows(*fine), scale=False)
        found = [float(number.replace(",", ".")) for number in fine]
        np.testing.assert_allclose(rows_of(source)["features"][:, 0], found, rtol=1e-6)


def test_points_between_thousands_are_not_read_as_decimal_points(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"column 'a' has 1\.453, which is 1\.453 with a decimal point, and 1453"
    ) as two:
        opened_csv(tmp_path, "a;y\n393;0\n1.453;1\n1.108;0\n")
    assert "write 1453 without the point" in two.value.hint
    # other numbers of the file have a decimal comma: what its points are is known
    rows = "a;b;y\n30,3;393;0\n116,2;1.453;1\n1.089,9;12.345.678;0\n"
    read = opened_csv(tmp_path, rows, scale=False)
    np.testing.assert_allclose(rows_of(read)["features"], [[30.3, 393], [116.2, 1453], [1089.9, 12_345_678]], rtol=1e-6)
    (tmp_path / "t.tsv").write_text(rows.replace(";", "\t"))
    tabs = Table(files=(str(tmp_path / "t.tsv"),), label="y", scale=False, test=0.0).open("train")
    np.testing.assert_array_equal(rows_of(tabs)["features"], rows_of(read)["features"])
    # new rows are read as those that the run was trained on, though they show no decimal comma
    data = Table(files=(str(tmp_path / "t.csv"),), label="y", scale=False, test=0.0)
    (tmp_path / "new.csv").write_text("a;b\n1.127;2.531\n")
    trained = data.with_fitted(data.open("train").fitted)
    assert rows_of(trained.unlabelled([str(tmp_path / "new.csv")]))["features"].tolist() == [[1127, 2531]]
    zeros = opened_csv(tmp_path, "a;y\n1,5;01\n2,5;1\n3,5;01\n", scale=False)
    assert zeros.class_names == ("01", "1")


def test_new_rows_say_where_they_differ_from_the_training_rows(tmp_path: Path) -> None:
    data = people(tmp_path, scale=True)
    example = data.open("train").example
    (tmp_path / "new.csv").write_text(
        "id,age,town,joined,member,left\n7,,Chur,2024-01-05,true,\n8,31,Bern,2024-01-06,true,\n"
    )
    found = inputs(data, example, [str(tmp_path / "new.csv")])
    assert found.origins == [{"row": 1, "id": 7, "left": None}, {"row": 2, "id": 8, "left": None}]
    assert list(found.source.notes) == [
        "column 'town': 1 row has 'Chur', which no training row has: none of its texts",
        "column 'age': 1 value is missing, 40, the median of the training rows, in their place",
    ]
    (tmp_path / "bad.csv").write_text("age,town,joined,member\n30,Bern,soon,true\n31,Bern,2024-01-06,true\n")
    with pytest.raises(DataError, match=r"bad.csv: column 'joined' has texts \(line 2: 'soon'\), and .* training rows"):
        inputs(data, example, [str(tmp_path / "bad.csv")])


def test_rows_of_a_split_are_known_by_their_row_in_the_file_and_their_id(tmp_path: Path) -> None:
    names = [f"a{number}" for number in range(40)]
    (tmp_path / "t.csv").write_text("id,x,y\n" + "".join(f"{name},{n},{n % 2}\n" for n, name in enumerate(names)))
    data = Table(files=(str(tmp_path / "t.csv"),), label="y", scale=False, test=0.3)
    source = data.open("test")
    for index, x in enumerate(rows_of(source)["features"][:, 0].astype(int).tolist()):
        assert source.origin_of(index) == {"row": x + 1, "id": names[x], "label": x % 2}
        assert source.place(index) == f"{tmp_path}/t.csv: row {x + 1} (id {names[x]})"
    (tmp_path / "u.csv").write_text("id,x,y\nb0,7,0\nb1,8,1\n")
    both = Table(files=(str(tmp_path / "t.csv"), str(tmp_path / "u.csv")), label="y", test=0.0).open("train")
    assert both.origin_of(41) == {"row": 2, "file": f"{tmp_path}/u.csv", "id": "b1", "label": 1}


def test_dates_are_dates_in_every_format_and_what_is_none_is_named(tmp_path: Path) -> None:
    days = [f"2024-01-{day:02}" for day in range(1, 21)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"d": day, "y": n % 2}) + "\n" for n, day in enumerate(days)))
    data = Table(files=(str(tmp_path / "d.jsonl"),), label="y", scale=False, test=0.0)
    np.testing.assert_array_equal(rows_of(data.open("train"))["features"][:, 0], np.arange(20) + 19_723)
    dotted = [f"{int(day[-2:])}.1.2024" if n % 2 else f"{day[-2:]}.01.2024" for n, day in enumerate(days)]
    read = opened_csv(tmp_path, "d,y\n" + "".join(f"{day},{n % 2}\n" for n, day in enumerate(dotted)), scale=False)
    np.testing.assert_array_equal(rows_of(read)["features"][:, 0], np.arange(20) + 19_723)
    days[6] = "12.31.2023"
    with pytest.raises(DataError, match=r"numbers or dates are written as texts in 'd'"):
        opened_csv(tmp_path, "d,y\n" + "".join(f"{day},{n % 2}\n" for n, day in enumerate(days)))
    days[6] = "12/31/2023"
    with pytest.raises(DataError, match=r"as texts in 'd' \(line 8: '12/31/2023'\)"):
        opened_csv(tmp_path, "d,y\n" + "".join(f"{day},{n % 2}\n" for n, day in enumerate(days)))
    zoned = opened_csv(tmp_path, "d,y\n2024-01-01T12:00:00Z,0\n2024-01-02T00:00:00Z,1\n", scale=False)
    assert rows_of(zoned)["features"][:, 0].tolist() == [19_723.5, 19_724]


@pytest.mark.parametrize("label", [np.array([[0], [1]]), np.eye(2, dtype=np.int64), np.eye(2)])
def test_a_label_of_an_npz_file_is_one_number(tmp_path: Path, label: np.ndarray) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), label=label)
    with pytest.raises(DataError, match="the label has the shape"):
        Npz(file=str(tmp_path / "a.npz")).open("train")


def write_npz(path: Path, **arrays: np.ndarray) -> str:
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    return str(path)


def test_predictions_are_for_the_arrays_of_a_file(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 3)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=x, klass=(x[:, 0] > 0).astype(np.int64))
    data = Npz(file=str(tmp_path / "rows.npz"), names={"x": "features", "klass": "label"})
    example = data.open("train").example
    np.savez(tmp_path / "new.npz", x=x[:4].astype(np.float64))
    found = inputs(data, example, [str(tmp_path / "new.npz")])
    assert found.origins == [{"row": 1}, {"row": 2}, {"row": 3}, {"row": 4}]
    np.testing.assert_array_equal(found.source.rows(np.arange(4))["features"], x[:4])
    with pytest.raises(DataError, match="has no array 'features'"):
        inputs(data, example, [write_npz(tmp_path / "none.npz", y=x)])
    # a target of a user's own model may be left out
    own = Npz(file=write_npz(tmp_path / "own.npz", x=x, tags=x > 0))
    some = inputs(own, own.open("train").example, [write_npz(tmp_path / "x.npz", x=x[:2]), own.file])
    assert (some.source.example.keys(), len(some.source)) == ({"x"}, 42)
    labelled = inputs(data, example, [str(tmp_path / "rows.npz")])
    assert labelled.origins[0] == {"row": 1, "label": int(x[0, 0] > 0)}
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 5), np.float32))
    with pytest.raises(DataError, match=r"has the shape \[5\], in training \[3\]"):
        inputs(data, example, [str(tmp_path / "wide.npz")])
    x[[3, 7], 1] = np.nan
    np.savez(tmp_path / "rows.npz", x=x, klass=np.zeros(40, np.int64))
    with pytest.raises(DataError, match="2 rows of 'features' with NaN or infinite numbers, the first is row 3"):
        data.open("train")
