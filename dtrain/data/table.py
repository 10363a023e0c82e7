"""Rows of a table: columns of numbers and a label, from CSV, Parquet, Arrow or JSON-lines files."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import Fraction, JsonObject
from dtrain.data.batch import FEATURES, LABEL, Example, Feature
from dtrain.data.data_check import BYTES, DataCheck
from dtrain.data.files import HERE, address_packages, resolve_files
from dtrain.data.guess import Guess
from dtrain.data.order import hash64
from dtrain.data.paths import reading
from dtrain.data.source import Arrays, Load, Source, Split, Unaugmented
from dtrain.data.table_files import labels_as_written, named_rows, read_tables
from dtrain.data.table_guess import CATEGORIES, NUMBER, identifies_rows, table_guesses

MISSING = "(missing)"
"""The text in place of one that is missing."""
SHOWN = 20
"""Most columns or classes that a message names."""


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
    """The columns that the model gets; default: all but the label. A column of texts becomes one of 0 and 1 for each
    text of the training rows, a date days since 1970."""
    missing: Literal["refuse", "median"] = "refuse"
    """What happens where a number is missing: refuse, or take the median of the training rows, with a column beside it
    that says where. A text that is missing is a text of its own."""
    scale: bool = True
    """Subtract from each column its mean over the training rows, and divide it by its standard deviation there."""
    test: Fraction = 0.1
    """Fraction of the rows held out for testing, selected by a hash of the row's number."""
    test_files: tuple[str, ...] = ()
    """Files for testing; if set, no row of `files` is held out."""
    load: Load = field(default_factory=Load)

    @classmethod
    def guesses(cls, path: Path) -> Iterator[Guess]:
        return table_guesses(path)

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
        features = {FEATURES: read.features(table), LABEL: read.labels(table.label)}
        classes = len(read.classes) if self.predict == "class" else None
        example = {
            FEATURES: Feature((len(read.names),), "float32"),
            LABEL: Feature((), str(features[LABEL].dtype), classes, spread=read.spread),
        }
        digest = hashlib.sha256(repr((read.names, read.classes)).encode())
        for values in features.values():
            digest.update(values.tobytes())
        fingerprint = f"table:{split}:{digest.hexdigest()[:16]}"
        return Rows(
            features,
            example,
            fingerprint,
            classes=read.classes,
            found=tuple(read.notes(split, table)),
            columns=read.names,
        )

    def inspect(self, check: DataCheck) -> None:
        files = check.files(self.files, self.test_files, "data")
        if not check.too_large(f"the rows of {len(files)} files", files, BYTES) and files:
            check.open(self, "data.files")

    def unlabelled(self, names: Sequence[str]) -> tuple[np.ndarray, list[JsonObject]]:
        """The columns of other files (rows, columns), encoded like the training rows, and for each row what else the
        file has: columns that the model does not get, and the label if it is there."""
        read = _Read(self)
        tables = read_tables(resolve_files(tuple(names), "a table", HERE))
        values = read.features(_columns(tables, read.columns, None, self.missing))
        rest = [name for name in tables[0][1].column_names if name not in read.columns]
        kept = [table.select([name for name in rest if name in table.column_names]).to_pylist() for _, table in tables]
        return values, [{name: _plain(value) for name, value in row.items()} for rows in kept for row in rows]


@dataclass(frozen=True)
class Rows(Arrays):
    """The rows of a split."""

    classes: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    """What was found in the files, as lines."""
    columns: tuple[str, ...] = ()
    """What the values of a row are."""

    @property
    def value_names(self) -> tuple[str, ...]:
        return self.columns

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classes

    @property
    def notes(self) -> Sequence[str]:
        return self.found


@dataclass(frozen=True)
class _Columns:
    values: Mapping[str, np.ndarray]
    """For each column (rows,): float64, with NaN where a number is missing, or strings."""
    label: np.ndarray
    """(rows,) of numbers or strings; empty if it was not asked for."""

    def rows(self, chosen: np.ndarray) -> "_Columns":
        return _Columns({name: column[chosen] for name, column in self.values.items()}, self.label[chosen])


@dataclass(frozen=True)
class _Read:
    """The files of a table: training and test rows, and what is computed from them."""

    data: Table

    @cached_property
    def _tables(self) -> list[tuple[Path, Any]]:
        return read_tables(resolve_files(self.data.files, "a table"))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns that the model gets."""
        path, table = self._tables[0]
        if self.data.label in self.data.columns:
            raise DataError(f"data.columns: has the label {self.data.label!r}", "leave it out: it is what is predicted")
        with reading(path):  # names that are no UTF-8
            return self.data.columns or tuple(
                name
                for name, column in zip(table.column_names, table.columns, strict=True)
                if name != self.data.label and not identifies_rows(name, column)
            )

    @cached_property
    def _all(self) -> _Columns:
        return _columns(self._tables, self.columns, self.data.label, self.data.missing, self.data.predict == "class")

    @cached_property
    def _held_out(self) -> np.ndarray:
        """Which rows are for testing, from a hash of their numbers."""
        share = hash64(np.arange(len(self._all.label), dtype=np.uint64)) / 2**64
        return share < self.data.test

    @cached_property
    def train(self) -> _Columns:
        if self.data.test_files:
            return self._all
        return self._all.rows(~self._held_out)

    @cached_property
    def test(self) -> _Columns:
        if self.data.test_files:
            files = read_tables(resolve_files(self.data.test_files, "a table"))
            return _columns(files, self.columns, self.data.label, self.data.missing, self.data.predict == "class")
        return self._all.rows(self._held_out)

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

    @property
    def spread(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the numbers to predict, over the training rows."""
        if self.data.predict == "class":
            return None
        label = self.labels(self.train.label).astype(np.float64)
        return float(label.mean()), float(label.std()) or 1.0

    @cached_property
    def categories(self) -> Mapping[str, list[str]]:
        """The texts that each column of texts has in the training rows. DataError if one has too many."""
        found, many = {}, []
        for name, column in self.train.values.items():
            if column.dtype.kind == "U":
                found[name] = sorted(set(column.tolist()))
                many += [f"{name!r} ({len(found[name]):,})"] * (len(found[name]) > CATEGORIES)
        written = [name for name, texts in found.items() if _numbers_as_texts(texts)]
        if written:
            message = f"{self.data.files[0]}: numbers are written as texts in {', '.join(map(repr, written))}"
            raise DataError(
                message,
                "write 1000 for 1,000 and 0.5 for 50%, nothing for ?; or name the other columns in data.columns",
            )
        if many:
            message = f"{self.data.files[0]}: columns of too many different texts: {', '.join(many)}"
            raise DataError(message, f"at most {CATEGORIES} become columns: name the others in data.columns")
        return found

    @cached_property
    def _medians(self) -> Mapping[str, float]:
        """The median of each column of numbers that lacks some in the training rows."""
        numbers = {name: column for name, column in self.train.values.items() if column.dtype.kind == "f"}
        return {name: _median(column) for name, column in numbers.items() if np.isnan(column).any()}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns that the model gets."""
        names = []
        for name in self.columns:
            names += [f"{name}={text}" for text in self.categories[name]] if name in self.categories else [name]
            names += [f"{name} is missing"] if name in self._medians else []
        return tuple(names)

    def _encoded(self, rows: _Columns) -> np.ndarray:
        """float64 (rows, names): numbers, medians where they are missing, and 0 and 1 for texts."""
        encoded = []
        for name in self.columns:
            column = rows.values[name]
            if name in self.categories:
                if column.dtype.kind != "U":
                    raise _mixed(f"{self.data.files[0]}: column {name!r} has texts in the training rows")
                encoded += [(column == text).astype(np.float64) for text in self.categories[name]]
                continue
            if column.dtype.kind == "U":
                raise _mixed(f"{self.data.files[0]}: column {name!r} has texts in some files")
            absent = np.isnan(column)
            fill = self._medians.get(name, _median(self.train.values[name])) if absent.any() else 0.0
            encoded.append(np.where(absent, fill, column))
            if name in self._medians:
                encoded.append(absent.astype(np.float64))
        return np.stack(encoded, 1)

    def features(self, rows: _Columns) -> np.ndarray:
        """The columns as the model gets them, float32. DataError if a value is too large for that."""
        values = self._encoded(rows)
        if self.data.scale:
            train = values if rows is self.train else self._encoded(self.train)
            with np.errstate(over="ignore", invalid="ignore"):
                equal = train.min(0) == train.max(0)  # rounding would give these a mean and a deviation of their own
                mean, deviation = np.where(equal, train[0], train.mean(0)), np.where(equal, 0, train.std(0))
                values = (values - mean) / np.where(deviation > 0, deviation, 1)
            values = np.where(np.isfinite(deviation), values, np.inf)
        return self._finite(values, self.names)

    def notes(self, split: Split, rows: _Columns) -> Iterator[str]:
        """What the columns became, and what is left out."""
        if self.classes:
            counts = Counter(self.labels(rows.label).tolist())
            shown = [f"{name} {counts[number]:,}" for number, name in enumerate(self.classes[:SHOWN])]
            more = f" and {len(self.classes) - SHOWN:,} more" if len(self.classes) > SHOWN else ""
            yield f"{len(rows.label):,} rows: {', '.join(shown)}{more}"
        if split == "test":
            for name, texts in self.categories.items():
                if unknown := set(rows.values[name].tolist()) - set(texts):
                    yield f"column {name!r}: {len(unknown):,} texts that no training row has count as none of them"
            return
        if self.categories:
            counts = [f"{name} ({len(texts)})" for name, texts in self.categories.items()]
            yield f"columns of texts, each text a column: {', '.join(counts)}"
        for name, median in self._medians.items():
            absent = int(np.isnan(rows.values[name]).sum())
            yield f"column {name!r}: {absent:,} values are missing, {median:g}, the median, in their place"
        present = dict.fromkeys(name for _, table in self._tables for name in table.column_names)
        left = [name for name in present if name not in (*self.columns, self.data.label)]
        if left:
            shown = ", ".join(map(str, left[:SHOWN])) + f" and {len(left) - SHOWN} more" * (len(left) > SHOWN)
            only = not self.data.columns and set(left) <= set(self._tables[0][1].column_names)
            why = ", which only identify the rows" if only else ""
            yield f"columns left out{why}: {shown}"

    def _finite(self, values: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """The values as float32."""
        with np.errstate(over="ignore", invalid="ignore"):
            cast = values.astype(np.float32)
        bad = np.argwhere(~np.isfinite(cast))
        if len(bad):
            message = f"{self.data.files[0]}: column {names[bad[0][1]]!r} has a value that float32 cannot hold"
            raise DataError(message, "write it in another unit, or as its logarithm")
        return cast


def _columns(
    tables: Sequence[tuple[Path, Any]], columns: Sequence[str], label: str | None, missing: str, classes: bool = False
) -> _Columns:
    """The columns of all files one after the other; `classes`: whether labels are names.

    DataError names the places of all values that cannot be used.
    """
    values: dict[str, list[np.ndarray]] = {name: [] for name in columns}
    labels, faults, unlabelled = [], list[str](), 0
    for path, table in tables:
        wanted = [*columns, *([label] if label else [])]
        absent = [name for name in wanted if name not in table.column_names]
        if absent:
            message = f"{path}: has no column {', '.join(map(repr, absent))}"
            raise DataError(message, f"it has {', '.join(table.column_names)}"[:500])
        twice = [name for name in wanted if table.column_names.count(name) > 1]
        if twice:
            raise DataError(
                f"{path}: two columns are named {twice[0]!r}", "rename or drop one: a join may have made it"
            )
        for name in columns:
            column, fault = _values(path, name, table[name], missing)
            values[name].append(column)
            faults += [fault] if fault else []
        if label:
            column, fault = _label(path, label, labels_as_written(path, table, label) if classes else table[label])
            labels.append(column)
            faults += [fault] if fault else []
            unlabelled += bool(fault)
    if not columns:
        raise DataError(f"{tables[0][0]}: has no column besides the label", "name columns in data.columns")
    if faults:
        hint = "fill them in, drop the rows, leave the column out of data.columns, or set data.missing: median"
        hint = "drop these rows, or fill the label in" if unlabelled == len(faults) else hint
        more = [f"and {len(faults) - SHOWN} more columns"] * (len(faults) > SHOWN)
        raise DataError("\n  ".join([*faults[:SHOWN], *more]), hint)
    for name, parts in values.items():
        if len({part.dtype.kind for part in parts}) > 1:
            raise _mixed(f"{tables[0][0]}: column {name!r} has texts in some files")
    joined = {name: np.concatenate(parts) for name, parts in values.items()}
    return _Columns(joined, np.concatenate(labels) if labels else np.empty(0))


def _mixed(found: str) -> DataError:
    hint = "write it alike in all files (a single `?` makes texts of numbers), or leave it out of data.columns"
    return DataError(f"{found} and numbers or dates in others", hint)


def _numbers_as_texts(texts: Sequence[str]) -> bool:
    """Whether most of the texts are numbers, and not all of them whole ones: with separators, with `?` among them."""
    there = [text.strip() for text in texts if text != MISSING]
    numbers = [text for text in there if NUMBER.fullmatch(text)]
    return 2 * len(numbers) > len(there) and not all(text.isdecimal() for text in there)


def _median(column: np.ndarray) -> float:
    """The median of the numbers that are there; 0 if none is."""
    there = column[~np.isnan(column)]
    return float(np.median(there)) if len(there) else 0.0


def _values(path: Path, name: str, column: Any, missing: str) -> tuple[np.ndarray, str]:
    """A column as float64 or as texts, and what is wrong with it."""
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    place = f"{path}: column {name!r}"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        with reading(place):
            texts = column.cast("string").to_pylist()
        return np.array([text if text else MISSING for text in texts], dtype=str), ""
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        with reading(place):
            column = column.cast(pa.timestamp("us"), safe=False)
        days = column.cast("int64").to_numpy(zero_copy_only=False).astype(np.float64)
        return _checked(place, path, days / 86_400e6, column, missing)
    if not (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
    ):
        message = f"{place} has values of type {column.type}, neither numbers nor texts nor dates"
        raise DataError(message, "leave it out of data.columns, or write it as numbers")
    with reading(place, "a float64 holds integers up to 9,007,199,254,740,992 exactly"):
        array = column.cast("float64").to_numpy().astype(np.float64)
    return _checked(place, path, array, column, missing)


def _checked(place: str, path: Path, array: np.ndarray, column: Any, missing: str) -> tuple[np.ndarray, str]:
    """The numbers, with NaN where one is missing, and what is wrong with them."""
    if column.null_count:
        array[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
    bad = np.flatnonzero(np.isinf(array) if missing == "median" else ~np.isfinite(array))
    return array, f"{place} has no finite number in {named_rows(path, bad, len(array))}" if len(bad) else ""


def _plain(value: Any) -> Any:
    """A value of a table as JSON has it."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _label(path: Path, name: str, column: Any) -> tuple[np.ndarray, str]:
    """The labels, and what is wrong with them."""
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if not (is_text or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        message = f"{path}: column {name!r} has values of type {column.type}, neither text nor numbers"
        raise DataError(message, "choose another data.label, or write it as text or numbers")
    with reading(f"{path}: column {name!r}"):
        array = column.to_numpy()
        array = array.astype(str) if array.dtype.kind == "O" and is_text and not column.null_count else array
    missing = column.is_null().to_numpy() if column.null_count else array == "" if is_text else np.zeros(0, bool)
    missing = np.isnan(array) if array.dtype.kind == "f" else missing
    bad = np.flatnonzero(missing)
    return array, f"{path}: column {name!r} has no value in {named_rows(path, bad, len(array))}" if len(bad) else ""
