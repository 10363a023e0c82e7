"""The columns of tables as arrays: numbers, texts, dates as days; what cannot be used is refused with its place."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.paths import reading
from dtrain.data.table_files import DATE, labels_as_written, named_rows

MISSING = "(missing)"
"""The text in place of one that is missing."""
MARKS = 3
"""Most different texts in a column of numbers that are taken for marks of missing values."""
SHOWN = 20
"""Most columns or classes that a message names."""
NUMBER = re.compile(r"\s*[-+]?[$€£]?\s*(\d+|\d{1,3}([,.' ]\d{3})+)([.,]\d+)?\s*[%$€£]?\s*")
"""A number with separators, a currency or a sign of percent."""
PLAIN = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
"""A number as it is read."""
ANY_DATE = re.compile(r"\d{4}[-/.]\d\d?[-/.]\d\d?\b.*|\d\d?[-/.]\d\d?[-/.](\d\d){1,2}\b.*")
"""A date as people write it."""


@dataclass(frozen=True)
class Columns:
    """Columns of one or several files."""

    tables: Sequence[tuple[Path, Any]]
    """The files, as Arrow tables."""
    numbers: np.ndarray
    """(rows,): the number of each row, counted from 0 through all files."""
    values: Mapping[str, np.ndarray]
    """For each column (rows,): float64, with NaN where a number is missing, or strings."""
    label: np.ndarray
    """(rows,) of numbers or strings; empty if it is not wanted."""

    def rows(self, chosen: np.ndarray) -> "Columns":
        values = {name: column[chosen] for name, column in self.values.items()}
        return Columns(self.tables, self.numbers[chosen], values, self.label[chosen])

    @property
    def file(self) -> Path:
        """The first file."""
        return self.tables[0][0]

    def of_file(self, index: int) -> tuple[Path, Any, int]:
        """The file of a row, as a table, and the row's number in it, from 0."""
        number = int(self.numbers[index])
        for path, table in self.tables:
            if number < len(table):
                return path, table, number
            number -= len(table)
        raise IndexError(index)

    def texts_among(self, name: str) -> str:
        """Where a column has texts among numbers or dates, as " (line 7: 'soon')"; empty if most of it are texts."""
        found = [(path, odd) for path, table in self.tables if (odd := odd_texts(path, table[name]))]
        return f" ({found[0][1] if found[0][0] == self.file else ': '.join(map(str, found[0]))})" if found else ""


def read_columns(
    tables: Sequence[tuple[Path, Any]], columns: Sequence[str], label: str | None, missing: str, classes: bool = False
) -> Columns:
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
            path, table = next(one for one, part in zip(tables, parts, strict=True) if part.dtype.kind == "U")
            raise mixed(f"{path}: column {name!r} has texts", table[name], path, "other files")
    joined = {name: np.concatenate(parts) for name, parts in values.items()}
    numbers = np.arange(sum(len(table) for _, table in tables))
    return Columns(tables, numbers, joined, np.concatenate(labels) if labels else np.empty(0))


def mixed(found: str, column: Any, path: Path, others: str) -> DataError:
    """The error for a column that has texts here, and numbers or dates in the others."""
    hint = "write it alike in all files, name texts of missing values in data.missing_texts, or leave the column out"
    there = _written(column)
    odd = [one for one in there if not any(re.fullmatch(form, one[1].strip()) for form in (PLAIN, DATE))]
    where = odd_texts(path, column) or _named(path, column, (odd or there)[:1])
    return DataError(f"{found} ({where}), and numbers or dates in {others}", hint)


def written_as_texts(texts: Iterable[str]) -> bool:
    """Whether most of the texts are numbers or dates, and not all of them whole numbers: with separators, with `?`."""
    there = [text.strip() for text in texts if text and text != MISSING]
    most = any(2 * sum(bool(form.fullmatch(text)) for text in there) > len(there) for form in (NUMBER, ANY_DATE))
    return most and not all(text.isdecimal() for text in there)


def odd_texts(path: Path, column: Any) -> str:
    """Where a column of texts has others among numbers, or among dates; empty if most of it are neither."""
    there = _written(column)
    for form in (PLAIN, re.compile(DATE)):
        odd = [one for one in there if not form.fullmatch(one[1].strip())]
        if odd and 2 * len(odd) < len(there):
            return _named(path, column, odd)
    return ""


def marks_of_missing(column: Any) -> set[str]:
    """The texts of a column of numbers or dates, if they are few and have no digit: such as `k.A.` or `?`."""
    there = [text for _, text in _written(column)]
    for form in (NUMBER, re.compile(DATE)):  # with decimal commas: only once the others are gone these are numbers
        odd = [text for text in there if not form.fullmatch(text.strip())]
        if odd and 2 * len(odd) < len(there):
            marks = set(odd)
            return marks if len(marks) <= MARKS and not any(map(str.isdigit, "".join(marks))) else set()
    return set()


def _written(column: Any) -> list[tuple[int, str]]:
    """The texts of a column that are not empty, with their rows."""
    return [(row, text) for row, text in enumerate(column.cast("string").to_pylist()) if text]


def _named(path: Path, column: Any, cells: Sequence[tuple[int, str]]) -> str:
    """Cells with their lines: "line 7: 'soon'"."""
    row, text = cells[0]
    more = f" and {count:,} more" if (count := len(cells) - 1) else ""
    return f"{named_rows(path, np.array([row]), len(column))}: {text[:30]!r}{more}"


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
