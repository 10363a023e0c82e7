"""Rows of a table: columns of numbers and a label, from CSV, Parquet, Arrow or JSON-lines files."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dtrain.core.counts import counted
from dtrain.core.errors import DataError
from dtrain.core.types import Fraction, JsonObject
from dtrain.data.arrays import Arrays
from dtrain.data.batch import FEATURES, LABEL, Example, Feature
from dtrain.data.data_check import BYTES, DataCheck
from dtrain.data.files import HERE, RELATIVE, address_packages, resolve_files
from dtrain.data.fitted import FittedTable, Scaling
from dtrain.data.guess import Guess
from dtrain.data.order import hash64
from dtrain.data.paths import reading
from dtrain.data.source import Load, Source, Split, Unaugmented
from dtrain.data.table_columns import MISSING, SHOWN, Columns, mixed, read_columns, written_as_texts
from dtrain.data.table_files import decimal_of, read_tables
from dtrain.data.table_guess import CATEGORIES, identifies_rows, table_guesses


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
    missing_texts: tuple[str, ...] = ()
    """Texts that mean that a value is missing, such as `k.A.`, in any column; those of nothing, `NA`, `NaN`, `null` and
    their like always do among numbers."""
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
        features = {FEATURES: read.features(table), LABEL: read.labels(table)}
        classes = len(read.fit.classes) if self.predict == "class" else None
        example = {
            FEATURES: Feature((len(read.fit.names),), "float32"),
            LABEL: Feature((), str(features[LABEL].dtype), classes, spread=read.spread),
        }
        digest = hashlib.sha256(repr((read.fit.names, tuple(read.fit.classes))).encode())
        for values in features.values():
            digest.update(values.tobytes())
        fingerprint = f"table:{split}:{digest.hexdigest()[:16]}"
        return Rows(
            features,
            example,
            fingerprint,
            classes=tuple(read.fit.classes),
            found=tuple(read.notes(split, table)),
            columns=read.fit.names,
            given=table,
            label=self.label,
            fit=read.fit,
        )

    @cached_property
    def kept(self) -> FittedTable | None:
        """What a run computed from the rows that it trained on; None: it is computed from the files."""
        return None

    def with_fitted(self, fitted: JsonObject) -> "Table":
        data = replace(self)
        vars(data).update(kept=FittedTable.from_values(fitted))  # as cached_property stores it
        return data

    def read(self, names: Sequence[str], hint: str = RELATIVE) -> list[tuple[Path, Any]]:
        """Files as Arrow tables; `hint` says where relative names start."""
        decimal = self.kept.decimal if self.kept else ""
        return read_tables(resolve_files(tuple(names), "a table", hint), self.missing_texts, decimal)

    def inspect(self, check: DataCheck) -> None:
        files = check.files(self.files, self.test_files, "data")
        if not check.too_large(f"the rows of {len(files)} files", files, BYTES) and files:
            check.open(self, "data.files")

    def unlabelled(self, names: Sequence[str]) -> "Rows":
        """The columns of other files, encoded like the training rows, without labels."""
        read = _Read(self)
        tables = self.read(names, HERE)
        rows = read_columns(tables, read.fit.columns, None, self.missing)
        values = read.features(rows)
        example = {FEATURES: Feature((values.shape[1],), "float32")}
        found = tuple(read.replaced(rows))
        return Rows({FEATURES: values}, example, "", given=rows, label=self.label, found=found, columns=read.fit.names)


@dataclass(frozen=True)
class Rows(Arrays):
    """The rows of a split."""

    given: Columns
    """The columns as they are in the files."""
    label: str
    """The column to predict."""
    classes: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    """What was found in the files, as lines."""
    columns: tuple[str, ...] = ()
    """What the values of a row are."""
    fit: FittedTable | None = None
    """What the training rows determine; None for rows without labels."""

    @property
    def fitted(self) -> JsonObject:
        return self.fit.values if self.fit else {}

    @cached_property
    def _names(self) -> list[str]:
        """Columns that identify the rows, which the model does not get."""
        _, table = self.given.tables[0]
        columns = zip(table.column_names, table.columns, strict=True)
        return [name for name, column in columns if name not in self.given.values and identifies_rows(name, column)]

    def place(self, index: int) -> str:
        path, table, row = self.given.of_file(index)
        known = ", ".join(f"{name} {table[name][row]}" for name in self._names if name in table.column_names)
        return f"{path}: row {row + 1}" + (f" ({known})" if known else "")

    def origin_of(self, index: int) -> JsonObject:
        path, table, row = self.given.of_file(index)
        kept = {
            LABEL if name == self.label else name: _plain(column[row].as_py())
            for name, column in zip(table.column_names, table.columns, strict=True)
            if name not in self.given.values
        }
        return {"row": row + 1} | ({"file": str(path)} if len(self.given.tables) > 1 else {}) | kept

    def names_of(self, feature: str) -> tuple[str, ...]:
        return self.columns if feature == FEATURES else ()

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classes

    @property
    def notes(self) -> Sequence[str]:
        return self.found


@dataclass(frozen=True)
class _Read:
    """The files of a table: training and test rows, and what is computed from them."""

    data: Table

    @cached_property
    def _tables(self) -> list[tuple[Path, Any]]:
        return self.data.read(self.data.files)

    @cached_property
    def fit(self) -> FittedTable:
        """What the training rows determine: as a run keeps it, or computed."""
        if (kept := self.data.kept) is not None:
            return kept
        numbers = {name: column for name, column in self.train.values.items() if name not in self.categories}
        fit = FittedTable(
            self.columns,
            self.categories,
            {name: _median(column) for name, column in numbers.items()},
            tuple(name for name, column in numbers.items() if np.isnan(column).any()),
            tuple(map(str, self._values)) if self.data.predict == "class" else (),
            decimal=decimal_of(self._tables),
        )
        spread = None
        if self.data.predict == "number":
            label = self._numbers(self.train).astype(np.float64)
            spread = (float(label.mean()), float(label.std()) or 1.0)
        scaling = Scaling.of(self._encoded(self.train, fit)) if self.data.scale else Scaling()
        return replace(fit, spread=spread, scaling=scaling)

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
    def _all(self) -> Columns:
        return self._columns(self._tables)

    def _columns(self, tables: Sequence[tuple[Path, Any]]) -> Columns:
        data = self.data
        columns = data.kept.columns if data.kept else self.columns
        return read_columns(tables, columns, data.label, data.missing, data.predict == "class")

    @cached_property
    def _held_out(self) -> np.ndarray:
        """Which rows are for testing, from a hash of their numbers."""
        share = hash64(np.arange(len(self._all.label), dtype=np.uint64)) / 2**64
        return share < self.data.test

    @cached_property
    def train(self) -> Columns:
        if self.data.test_files:
            return self._all
        return self._all.rows(~self._held_out)

    @cached_property
    def test(self) -> Columns:
        if self.data.test_files:
            return self._columns(self.data.read(self.data.test_files))
        return self._all.rows(self._held_out)

    @cached_property
    def _values(self) -> list[Any]:
        """The classes, of both splits, in the order of their values."""
        return sorted({*self._alike(self._all.label), *self._alike(self.test.label)})

    def _alike(self, label: np.ndarray) -> list[Any]:
        """Labels in the one type of all files: text, if one of them has text."""
        return label.astype(np.result_type(self._all.label, self.test.label)).tolist()

    def labels(self, rows: Columns) -> np.ndarray:
        """The number of each label's class, int32, or the label itself, float32. DataError for a class that the run was
        not trained on."""
        if self.data.predict == "number":
            return self._numbers(rows)
        number = {name: i for i, name in enumerate(self.fit.classes)}
        names = list(map(str, self._alike(rows.label)))
        if unknown := sorted(set(names) - set(number)):
            message = f"{rows.file}: the label has {unknown[0]!r}, and none of the rows that the run was trained on"
            raise DataError(message, f"its classes are {', '.join(self.fit.classes)}")
        return np.array([number[name] for name in names], np.int32)

    def _numbers(self, rows: Columns) -> np.ndarray:
        if rows.label.dtype.kind not in "iuf":
            where = f"{rows.file}: column {self.data.label!r} has text{rows.texts_among(self.data.label)}"
            raise DataError(f"{where}, and data.predict is number", "use data.predict: class, or a column of numbers")
        return _finite(rows, rows.label[:, None], (self.data.label,))[:, 0]

    @property
    def spread(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the numbers to predict, over the training rows."""
        return (self.fit.spread[0], self.fit.spread[1]) if self.fit.spread else None

    @cached_property
    def categories(self) -> Mapping[str, list[str]]:
        """The texts that each column of texts has in the training rows. DataError if one has too many."""
        found, many = {}, []
        for name, column in self.train.values.items():
            if column.dtype.kind == "U":
                found[name] = sorted(set(column.tolist()))
                many += [f"{name!r} ({len(found[name]):,})"] * (len(found[name]) > CATEGORIES)
        if written := [name for name, texts in found.items() if written_as_texts(texts)]:
            shown = ", ".join(f"{name!r}{self.train.texts_among(name)}" for name in written)
            message = f"{self.train.file}: numbers or dates are written as texts in {shown}"
            hint = "write 1000 for 1,000, 0.5 for 50%, 2024-12-31 for dates; data.missing_texts: ['?'] if ? is nothing"
            raise DataError(message, f"{hint}; or name the other columns in data.columns")
        if many:
            message = f"{self.data.files[0]}: columns of too many different texts: {', '.join(many)}"
            raise DataError(message, f"at most {CATEGORIES} become columns: name the others in data.columns")
        return found

    def _encoded(self, rows: Columns, fit: FittedTable) -> np.ndarray:
        """float64 (rows, names): numbers, medians where they are missing, and 0 and 1 for texts."""
        encoded = []
        for name in fit.columns:
            column = rows.values[name]
            if (column.dtype.kind == "U") != (name in fit.categories):
                raise self._mixed(rows, name, fit)
            if name in fit.categories:
                encoded += [(column == text).astype(np.float64) for text in fit.categories[name]]
                continue
            absent = np.isnan(column)
            encoded.append(np.where(absent, fit.medians[name], column))
            if name in fit.gaps:
                encoded.append(absent.astype(np.float64))
        return np.stack(encoded, 1)

    def _mixed(self, rows: Columns, name: str, fit: FittedTable) -> DataError:
        """The error for a column that has texts in these rows and numbers in the training rows, or vice versa."""
        here, others = (rows, "the training rows") if name not in fit.categories else (None, f"{rows.file}")
        if here is None and self.data.kept is None:
            here = self.train
        if here is None:
            texts = ", ".join(map(repr, list(fit.categories[name])[:3]))
            message = f"{rows.file}: column {name!r} has numbers or dates, and texts in the training rows: {texts}"
            return DataError(message, "write it alike in all files")
        (path, table), *_ = here.tables
        return mixed(f"{path}: column {name!r} has texts", table[name], path, others)

    def features(self, rows: Columns) -> np.ndarray:
        """The columns as the model gets them, float32. DataError if a value is too large for that."""
        return _finite(rows, self.fit.scaling(self._encoded(rows, self.fit)), self.fit.names)

    def replaced(self, rows: Columns) -> Iterator[str]:
        """What stands for texts that no training row has, and for numbers that are missing."""
        fit = self.fit
        for name, texts in fit.categories.items():
            column = rows.values[name]
            if unknown := sorted(set(column.tolist()) - set(texts)):
                some = [repr(text) for text in unknown[:3]] + ["..."] * (len(unknown) > 3)
                found = counted(int(np.isin(column, unknown).sum()), "row has", "rows have")
                yield f"column {name!r}: {found} {', '.join(some)}, which no training row has: none of its texts"
        for name in fit.columns:
            if name not in fit.categories and (absent := int(np.isnan(rows.values[name]).sum())):
                gaps = counted(absent, "value is missing", "values are missing")
                yield f"column {name!r}: {gaps}, {fit.medians[name]:g}, the median of the training rows, in their place"

    def notes(self, split: Split, rows: Columns) -> Iterator[str]:
        """What the columns became, and what is left out."""
        if classes := self.fit.classes:
            counts = Counter(self.labels(rows).tolist())
            shown = [f"{name} {counts[number]:,}" for number, name in enumerate(classes[:SHOWN])]
            more = f" and {len(classes) - SHOWN:,} more" if len(classes) > SHOWN else ""
            yield f"{counted(len(rows.label), 'row')}: {', '.join(shown)}{more}"
        if split == "test":
            yield from self.replaced(rows)
            return
        if self.categories:
            counts = [
                f"{name} ({len(texts) - 1} and empty cells)" if MISSING in texts else f"{name} ({len(texts)})"
                for name, texts in self.categories.items()
            ]
            yield f"columns of texts, each text a column: {', '.join(counts)}"
        yield from self.replaced(rows)
        present = dict.fromkeys(name for _, table in self._tables for name in table.column_names)
        left = [name for name in present if name not in (*self.fit.columns, self.data.label)]
        if left:
            shown = ", ".join(map(str, left[:SHOWN])) + f" and {len(left) - SHOWN} more" * (len(left) > SHOWN)
            only = not self.data.columns and set(left) <= set(self._tables[0][1].column_names)
            why = ", which only identify the rows" if only else ""
            yield f"columns left out{why}: {shown}"


def _finite(rows: Columns, values: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The values (rows, names) as float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(np.float32)
    bad = np.argwhere(~np.isfinite(cast))
    if len(bad):
        message = f"{rows.file}: column {names[bad[0][1]]!r} has a value that float32 cannot hold"
        raise DataError(message, "write it in another unit, or as its logarithm")
    return cast


def _median(column: np.ndarray) -> float:
    """The median of the numbers that are there; 0 if none is."""
    there = column[~np.isnan(column)]
    return float(np.median(there)) if len(there) else 0.0


def _plain(value: Any) -> Any:
    """A value of a table as JSON has it."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)
