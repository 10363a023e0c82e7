"""Rows of a table: columns of numbers and a label, from CSV, Parquet, Arrow or JSON-lines files."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dtrain.core.errors import DataError, missing_package
from dtrain.core.types import Fraction
from dtrain.data.batch import FEATURES, LABEL, Example, Feature
from dtrain.data.data_check import BYTES, DataCheck
from dtrain.data.files import HERE, address_packages, resolve_files
from dtrain.data.order import hash64
from dtrain.data.paths import reading, reason
from dtrain.data.source import Arrays, Load, Source, Split, Unaugmented

SUFFIXES = (".csv", ".tsv", ".parquet", ".arrow", ".feather", ".jsonl", ".ndjson")
HINT = f"tables end in {', '.join(SUFFIXES)}; CSV and JSON lines may end in .gz, too"


@dataclass(frozen=True, kw_only=True)
class Table(Unaugmented):
    """Rows of one or several files with the same columns; all of them are read into memory."""

    kind: Literal["table"] = "table"
    files: tuple[str, ...]
    """Files or globs: CSV, Parquet, Arrow, JSON lines."""
    label: str
    """The column to predict."""
    predict: Literal["class", "number"] = "class"
    """class: the label's different values are classes; number: the label is a number."""
    columns: tuple[str, ...] = ()
    """The columns of numbers that the model gets; default: all but the label."""
    scale: bool = True
    """Subtract from each column its mean over the training rows, and divide it by its standard deviation there."""
    test: Fraction = 0.1
    """Fraction of the rows held out for testing, selected by a hash of the row's number."""
    test_files: tuple[str, ...] = ()
    """Files for testing; if set, no row of `files` is held out."""
    load: Load = field(default_factory=Load)

    @property
    def packages(self) -> tuple[str, ...]:
        return ("pyarrow", *address_packages((*self.files, *self.test_files)))

    @property
    def reads_inputs(self) -> bool:
        return True

    def example(self) -> Example | None:
        return None

    def open(self, split: Split) -> Source:
        """Read a split. DataError if a value is missing or no number, or if there are no rows."""
        read = _Read(self)
        table = read.test if split == "test" else read.train
        if not len(table.label):
            raise DataError(f"{self.files[0]}: no row for the {split} split", "use more rows, or another data.test")
        features = {FEATURES: read.scaled(table.values), LABEL: read.labels(table.label)}
        classes = len(read.classes) if self.predict == "class" else None
        example = {
            FEATURES: Feature((len(read.columns),), "float32"),
            LABEL: Feature((), str(features[LABEL].dtype), classes),
        }
        digest = hashlib.sha256(repr((read.columns, read.classes)).encode())
        for values in features.values():
            digest.update(values.tobytes())
        return Rows(features, example, f"table:{split}:{digest.hexdigest()[:16]}", classes=read.classes)

    def inspect(self, check: DataCheck) -> None:
        files = check.files(self.files, self.test_files, "data")
        if not check.too_large(f"the rows of {len(files)} files", files, BYTES) and files:
            check.open(self, "data.files")

    def unlabelled(self, names: Sequence[str]) -> np.ndarray:
        """The columns of other files (rows, columns), scaled like the training rows. The label may be missing."""
        read = _Read(self)
        return read.scaled(_columns(_tables(resolve_files(tuple(names), "a table", HERE)), read.columns, None).values)


@dataclass(frozen=True)
class Rows(Arrays):
    """The rows of a split."""

    classes: tuple[str, ...] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classes


@dataclass(frozen=True)
class _Columns:
    values: np.ndarray
    """float64 (rows, columns)."""
    label: np.ndarray
    """(rows,) of numbers or strings; empty if it was not asked for."""


@dataclass(frozen=True)
class _Read:
    """The files of a table: training and test rows, and what is computed from them."""

    data: Table

    @cached_property
    def _tables(self) -> list[tuple[Path, Any]]:
        return _tables(resolve_files(self.data.files, "a table"))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns that the model gets."""
        path, table = self._tables[0]
        with reading(path):  # names that are no UTF-8
            return self.data.columns or tuple(name for name in table.column_names if name != self.data.label)

    @cached_property
    def _all(self) -> _Columns:
        return _columns(self._tables, self.columns, self.data.label)

    @cached_property
    def _held_out(self) -> np.ndarray:
        """Which rows are for testing, from a hash of their numbers."""
        share = hash64(np.arange(len(self._all.label), dtype=np.uint64)) / 2**64
        return share < self.data.test

    @cached_property
    def train(self) -> _Columns:
        if self.data.test_files:
            return self._all
        return _Columns(self._all.values[~self._held_out], self._all.label[~self._held_out])

    @cached_property
    def test(self) -> _Columns:
        if self.data.test_files:
            return _columns(_tables(resolve_files(self.data.test_files, "a table")), self.columns, self.data.label)
        return _Columns(self._all.values[self._held_out], self._all.label[self._held_out])

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, of both splits, in the order of their values."""
        if self.data.predict == "number":
            return ()
        return tuple(str(value) for value in self._values)

    @cached_property
    def _values(self) -> list[Any]:
        return sorted({*self._alike(self._all.label), *self._alike(self.test.label)})

    def _alike(self, label: np.ndarray) -> list[Any]:
        """Labels in the one type of all files: text, if one of them has text."""
        return label.astype(np.result_type(self._all.label, self.test.label)).tolist()

    def labels(self, label: np.ndarray) -> np.ndarray:
        """The number of each label's class, int32, or the label itself, float32."""
        if self.data.predict == "class":
            number = {value: i for i, value in enumerate(self._values)}
            label = np.array(self._alike(label))
            return np.array([number[value] for value in label.tolist()], np.int32)
        if label.dtype.kind not in "iuf":
            message = f"{self.data.files[0]}: column {self.data.label!r} has text, and data.predict is number"
            raise DataError(message, "use data.predict: class, or a column of numbers")
        return self._finite(label[:, None], (self.data.label,))[:, 0]

    def scaled(self, values: np.ndarray) -> np.ndarray:
        """The columns as the model gets them, float32. DataError if a value is too large for that."""
        if self.data.scale:
            with np.errstate(over="ignore", invalid="ignore"):
                deviation = self.train.values.std(0)
                values = (values - self.train.values.mean(0)) / np.where(deviation > 0, deviation, 1)
            values = np.where(np.isfinite(deviation), values, np.inf)
        return self._finite(values, self.columns)

    def _finite(self, values: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """The values as float32."""
        with np.errstate(over="ignore", invalid="ignore"):
            cast = values.astype(np.float32)
        bad = np.argwhere(~np.isfinite(cast))
        if len(bad):
            message = f"{self.data.files[0]}: column {names[bad[0][1]]!r} has a value that float32 cannot hold"
            raise DataError(message, "write it in another unit, or as its logarithm")
        return cast


def _columns(tables: Sequence[tuple[Path, Any]], columns: Sequence[str], label: str | None) -> _Columns:
    """The columns of all files one after the other. DataError names the place of a value that is no number."""
    values, labels = [], []
    for path, table in tables:
        wanted = [*columns, *([label] if label else [])]
        missing = [name for name in wanted if name not in table.column_names]
        if missing:
            raise DataError(f"{path}: has no column {missing[0]!r}", f"it has {', '.join(table.column_names)}"[:500])
        twice = [name for name in wanted if table.column_names.count(name) > 1]
        if twice:
            raise DataError(
                f"{path}: two columns are named {twice[0]!r}", "rename or drop one: a join may have made it"
            )
        values.append(np.stack([_numbers(path, name, table[name]) for name in columns], 1) if columns else np.empty(0))
        if label:
            labels.append(_label(path, label, table[label]))
    if not columns:
        raise DataError(f"{tables[0][0]}: has no column besides the label", "name columns of numbers in data.columns")
    return _Columns(np.concatenate(values), np.concatenate(labels) if labels else np.empty(0))


def _numbers(path: Path, name: str, column: Any) -> np.ndarray:
    import pyarrow as pa

    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        message = f"{path}: column {name!r} has values of type {kind}, not numbers"
        raise DataError(message, "leave it out of data.columns, or write it as numbers")
    with reading(f"{path}: column {name!r}", "a float64 holds integers up to 9,007,199,254,740,992 exactly"):
        array = column.cast("float64").to_numpy()
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        message = f"{path}: column {name!r} has no finite number in row {bad[0] + 1}"
        raise DataError(message, "fill it in, or drop the row")
    return array


def _label(path: Path, name: str, column: Any) -> np.ndarray:
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if not (is_text or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        message = f"{path}: column {name!r} has values of type {column.type}, neither text nor numbers"
        raise DataError(message, "choose another data.label, or or write it as text or numbers")
    with reading(f"{path}: column {name!r}"):
        array = column.to_numpy()
        array = array.astype(str) if array.dtype.kind == "O" and is_text and not column.null_count else array
    missing = column.is_null().to_numpy() if column.null_count else array == "" if is_text else np.zeros(0, bool)
    missing = np.isnan(array) if array.dtype.kind == "f" else missing
    if missing.any():
        row = missing.argmax() + 1
        raise DataError(f"{path}: column {name!r} has no value in row {row}", "fill it in, or drop the row")
    return array


def _tables(files: Sequence[Path]) -> list[tuple[Path, Any]]:
    """Every file as an Arrow table. DataError if one cannot be read."""
    read = []
    for path in files:
        suffixes = [suffix.lower() for suffix in path.suffixes]
        suffix = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else "".join(suffixes[-1:])
        if suffix not in SUFFIXES:
            raise DataError(f"{path}: is no table", HINT)
        try:
            table = _reader(suffix)(str(path))
            table.validate(full=True)  # Arrow trusts offsets in the file, also those that point to other memory
            read.append((path, table))
        except ModuleNotFoundError as error:
            raise missing_package(error) from error
        except Exception as error:  # pyarrow raises many types on damaged files
            raise DataError(f"{path}: cannot be read as a table: {reason(error)}", HINT) from error
    return read


def _reader(suffix: str) -> Callable[[str], Any]:
    """The function of pyarrow that reads such files."""
    import pyarrow.csv
    import pyarrow.feather
    import pyarrow.json
    import pyarrow.parquet

    if suffix in (".csv", ".tsv"):
        options = pyarrow.csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ",")
        return lambda path: pyarrow.csv.read_csv(path, parse_options=options)
    if suffix in (".jsonl", ".ndjson"):
        return pyarrow.json.read_json
    return pyarrow.parquet.read_table if suffix == ".parquet" else pyarrow.feather.read_table
