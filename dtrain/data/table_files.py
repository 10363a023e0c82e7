"""Files of tables: CSV, Parquet, Arrow and JSON lines."""

import gzip
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.core.errors import DataError, missing_package
from dtrain.data.paths import reason

SUFFIXES = (".csv", ".tsv", ".parquet", ".arrow", ".feather", ".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
HEAD = 2**16
"""First bytes of a CSV file that tell what separates its columns."""
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""The marks at the begin of a text in UTF-16."""
LATIN = "convert it to UTF-8: iconv -f cp1252 -t utf-8 FILE"
ZEROS = re.compile(r"\s*[-+]?0\d|\s*\+")
"""A number that is not written as Arrow would write it."""
DATE = r"(\d{4}-\d\d-\d\d|\d\d?\.\d\d?\.\d{4})([ T]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[-+]\d\d(:?\d\d)?)?)?"
"""A date as it is read, with a time or without: 2024-12-31, or 31.12.2024, which has its day first everywhere."""
PLACES = 8
"""Most rows that a message names."""
HINT = f"tables end in {', '.join(SUFFIXES)}; CSV and JSON lines may end in .gz, too"


def read_tables(files: Sequence[Path], missing: Sequence[str] = (), decimal: str = "") -> list[tuple[Path, Any]]:
    """Every file as an Arrow table, nothing in place of the texts `missing`. DataError if one cannot be read.

    `decimal`: the decimal sign of CSV files that show none.
    """
    read = []
    for path in files:
        if _suffix(path) not in SUFFIXES:
            raise DataError(f"{path}: is no table", HINT)
        try:
            table = _reader(path, missing, decimal)(path)
            table.validate(full=True)  # Arrow trusts offsets in the file, also those that point to other memory
            read.append((path, _with_dates(_without(_with_floats(table), missing))))
        except DataError:
            raise
        except ModuleNotFoundError as error:
            raise missing_package(error) from error
        except Exception as error:  # pyarrow raises many types on damaged files
            hint = LATIN if re.search("utf-?8", str(error), re.IGNORECASE) else HINT
            raise DataError(f"{path}: cannot be read as a table: {reason(error)}", hint) from error
    return read


def _with_floats(table: Any) -> Any:
    """The table with floats in place of decimals, as databases write prices."""
    import pyarrow as pa

    for number, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if pa.types.is_decimal(column.type):
            table = table.set_column(number, name, column.cast(pa.float64()))
    return table


def _without(table: Any, missing: Sequence[str]) -> Any:
    """The table with empty texts in place of the texts `missing`."""
    import pyarrow as pa
    from pyarrow import compute

    for number, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if missing and (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            absent = compute.is_in(column, value_set=pa.array(missing, column.type))  # pyright: ignore
            empty = compute.if_else(absent, pa.scalar("", column.type), column)  # pyright: ignore
            table = table.set_column(number, name, empty)
    return table


def _with_dates(table: Any) -> Any:
    """The table with dates in place of the texts of columns that have nothing else, as in files without such a type."""
    import pyarrow as pa
    from pyarrow import compute

    for number, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)) or not len(column):
            continue
        there = compute.if_else(compute.equal(column, ""), pa.scalar(None, column.type), column)  # pyright: ignore
        are_dates = compute.match_substring_regex(there, f"^({DATE})$")  # pyright: ignore
        if there.null_count == len(there) or not compute.all(are_dates).as_py():  # pyright: ignore
            continue
        there = _year_first(there)
        zoned = bool(compute.any(compute.match_substring_regex(there, "[ T].*[-+Z]")).as_py())  # pyright: ignore
        whole = compute.max(compute.utf8_length(there)).as_py() == len("2024-12-31")  # pyright: ignore
        with suppress(pa.ArrowInvalid):  # such as 2024-13-31 or 12.31.2024, or zones in some alone: they stay texts
            kind = pa.date32() if whole else pa.timestamp("us", tz="UTC" if zoned else None)
            table = table.set_column(number, name, there.cast(kind))
    return table


def _year_first(dates: Any) -> Any:
    """Dates with 2024-02-01 in place of 1.2.2024."""
    from pyarrow import compute

    for found, written in ((r"^(\d)\.", r"0\1."), (r"\.(\d)\.", r".0\1."), (r"^(\d\d)\.(\d\d)\.(\d{4})", r"\3-\2-\1")):
        dates = compute.replace_substring_regex(dates, found, written)  # pyright: ignore
    return dates


def _suffix(path: Path) -> str:
    """The suffix that tells the format, in lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else "".join(suffixes[-1:])


def _csv(path: Path, convert: Any = None, missing: Sequence[str] = (), decimal: str = "") -> Any:
    """A CSV file. What separates its columns, and its encoding, are those of its first line."""
    from pyarrow import csv

    encoding, delimiter = "utf8", DELIMITERS[_suffix(path)]
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
        start = file.read(HEAD)
    if start.startswith(UTF_16):
        encoding, start = "utf-16", start[: len(start) // 2 * 2].decode("utf-16", "ignore").encode()
    named = re.match(rb"(?:\xef\xbb\xbf)?sep=(.)\r?\n", start)  # Excel's own first line
    start = start[named.end() :] if named else start
    first, _, rest = start.partition(b"\n")
    if delimiter == "," and b";" in first and b"," not in first:  # as spreadsheets write it where 1,5 is a number
        delimiter = ";"
    delimiter = named[1].decode("latin-1") if named else delimiter
    decimal = "." if delimiter == "," else _decimal(rest.decode("latin-1"), delimiter) or decimal or "."
    given, convert = convert, convert or csv.ConvertOptions()
    convert.decimal_point = decimal
    convert.null_values = [*convert.null_values, *missing]
    read, parse = csv.ReadOptions(encoding=encoding, skip_rows=bool(named)), csv.ParseOptions(delimiter=delimiter)
    table = csv.read_csv(path, read_options=read, parse_options=parse, convert_options=convert)
    if delimiter == ";" or decimal == ",":
        _refuse_two_readings(path, table, decimal, read, parse)
    if decimal == "," and not given:
        table = _without_points(table, missing).replace_schema_metadata({DECIMAL: decimal})
    raw = [name for name, kind in zip(table.column_names, table.schema.types, strict=True) if kind == "binary"]
    if raw:
        raise DataError(f"{path}: column {raw[0]!r} is not UTF-8", LATIN)
    return table


GROUPED = {sign: rf"^\s*[-+]?[1-9]\d{{0,2}}([{sign}]\d{{3}})+\s*$" for sign in ",."}
"""By what is between its thousands, a whole number. If that is the decimal sign, 2,531 or 2.531 has two readings."""
WITH_POINTS = r"^\s*[-+]?(\d+|\d{1,3}(\.\d{3})+)(,\d*)?\s*$"
"""A number with a decimal comma, and with points between thousands or without."""
DECIMAL = b"decimal"
"""The key of a table's metadata for the decimal sign of its file, if that is a comma."""


def decimal_of(tables: Sequence[tuple[Path, Any]]) -> str:
    """The decimal sign of files, if one of them shows that it is a comma; else empty."""
    return "," if any(DECIMAL in (table.schema.metadata or {}) for _, table in tables) else ""


def _decimal(text: str, delimiter: str) -> str:
    """The decimal sign of the numbers of a CSV file, from its first lines; empty if none shows it.

    A number such as 2,531 or 2.531 shows none, but for 2,531 in a file with semicolons: these are there because commas
    are within numbers.
    """
    numbers = re.findall(rf'(?m)(?:^|{delimiter})"?[ ]*[-+]?([\d.,]+)[ ]*"?(?={delimiter}|\r?$)', text)
    grouped = {sign: re.compile(pattern) for sign, pattern in GROUPED.items()}
    if any(re.fullmatch(r"\d*\.\d+", number) and not grouped["."].match(number) for number in numbers):
        return "."
    commas = [number for number in numbers if re.fullmatch(WITH_POINTS, number) and "," in number]
    sure = delimiter == ";" or any(not grouped[","].match(number) for number in commas)
    return "," if commas and sure else ""


def _without_points(table: Any, missing: Sequence[str]) -> Any:
    """The table with numbers in place of the texts of columns whose numbers have points between thousands: 1.453,50."""
    import pyarrow as pa
    from pyarrow import compute, csv

    nothing = pa.array([*csv.ConvertOptions().null_values, *missing])
    for number, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if not pa.types.is_string(column.type):
            continue
        there = compute.if_else(compute.is_in(column, value_set=nothing), None, column)  # pyright: ignore
        if there.null_count < len(there) and compute.all(compute.match_substring_regex(there, WITH_POINTS)).as_py():  # pyright: ignore
            plain = compute.replace_substring(compute.replace_substring(there, ".", ""), ",", ".")  # pyright: ignore
            whole = not compute.any(compute.match_substring(there, ",")).as_py()  # pyright: ignore
            kind = pa.int64() if whole else pa.float64()
            table = table.set_column(number, name, compute.utf8_trim_whitespace(plain).cast(kind))  # pyright: ignore
    return table


def _refuse_two_readings(path: Path, table: Any, decimal: str, read: Any, parse: Any) -> None:
    """DataError for a column in which some numbers have three digits after the decimal sign, and the others none: 950
    and 2,531 are then probably whole numbers."""
    import pyarrow as pa
    from pyarrow import compute, csv

    floats = [name for name, kind in zip(table.column_names, table.schema.types, strict=True) if kind == "double"]
    convert = csv.ConvertOptions(column_types=dict.fromkeys(floats, pa.string()), include_columns=floats)
    if not floats:
        return
    texts = csv.read_csv(path, read_options=read, parse_options=parse, convert_options=convert)
    for name in floats:
        there = texts[name].drop_null()
        grouped = compute.match_substring_regex(there, GROUPED[decimal])  # pyright: ignore
        plain = compute.match_substring_regex(there, r"^\s*[-+]?\d*\s*$")  # pyright: ignore
        all_whole = compute.all(compute.or_(grouped, plain)).as_py()  # pyright: ignore
        if all_whole and compute.any(grouped).as_py() and compute.any(plain).as_py():  # pyright: ignore
            text = there.filter(grouped)[0].as_py().strip()
            sign, without = {",": "comma", ".": "point"}[decimal], text.replace(decimal, "")
            where = f"{path}: column {name!r} has {text}, which is {text.replace(',', '.')} with a decimal {sign}"
            hint = f"write {without} without the {sign}, or {text}0 if it is none of thousands"
            raise DataError(f"{where}, and {without} with a {sign} for thousands, as beside whole numbers", hint)


def _reader(path: Path, missing: Sequence[str], decimal: str) -> Callable[[Path], Any]:
    """The function of pyarrow that reads such a file."""
    import pyarrow.feather
    import pyarrow.json
    import pyarrow.parquet

    suffix = _suffix(path)
    if suffix in DELIMITERS:
        return partial(_csv, missing=missing, decimal=decimal)
    if suffix in (".jsonl", ".ndjson"):
        return pyarrow.json.read_json
    return pyarrow.parquet.read_table if suffix == ".parquet" else pyarrow.feather.read_table


def labels_as_written(path: Path, table: Any, label: str) -> Any:
    """The labels of a CSV file as its texts, if some are numbers with zeros before them: 01 and 1 are two classes."""
    import pyarrow as pa
    from pyarrow import compute
    from pyarrow.csv import ConvertOptions

    if _suffix(path) not in DELIMITERS or not pa.types.is_integer(table[label].type):
        return table[label]
    texts = _csv(path, ConvertOptions(column_types={label: pa.string()}, include_columns=[label]))[label]
    texts = compute.if_else(table[label].is_valid(), texts, pa.scalar(None, pa.string()))  # pyright: ignore
    padded = any(ZEROS.match(text or "") for text in texts.unique().to_pylist())
    return texts if padded else table[label]


def named_rows(path: Path, rows: np.ndarray, count: int) -> str:
    """Rows of a table by their lines in the file, where these are known."""
    first, word = 1, "row"
    if path.suffix.lower() in (".csv", ".tsv", ".jsonl", ".ndjson"):
        header = path.suffix.lower() in (".csv", ".tsv")
        with path.open("rb") as file:
            lines = sum(1 for _ in file)
        if lines == count + header:  # no value has a line break, and no line is empty
            first, word = 1 + header, "line"
    shown = ", ".join(f"{row + first:,}" for row in rows[:PLACES].tolist())
    more = f" and {len(rows) - PLACES:,} more" if len(rows) > PLACES else ""
    return f"{word}{'s' * (len(rows) > 1)} {shown}{more}"
