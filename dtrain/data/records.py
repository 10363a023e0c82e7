"""Records of files: JSON, JSON lines, Parquet, Arrow, WebDataset, ArrayRecord; each with where it is."""

import codecs
import gzip
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from dtrain.core.errors import DataError
from dtrain.core.files import refuse_pointer
from dtrain.data.files import resolve_files
from dtrain.data.paths import CACHE, is_remote, reading, reason
from dtrain.data.record import HALF, LIMITS, UNREAD, Limits, Record, object_of, record_of, too_large
from dtrain.data.tar_records import tar_records

LINES = (".jsonl", ".ndjson")
COLUMNS = (".parquet", ".arrow", ".feather")
MEMBERS = (".tar",)
"""WebDataset: consecutive members of one name, up to its first dot, are one record."""
ARRAYS = (".array_record", ".arrayrecord")
SUFFIXES = (".json", *LINES, *COLUMNS, *MEMBERS, *ARRAYS)
HINT = f"such files end in {', '.join(SUFFIXES)}; .json, .jsonl and .tar may be compressed, too (.gz)"

SPLITS = ("train", "test", "val", "valid", "validation", "dev", "eval")
"""First words of names of files that are splits of their own."""
AT_ONCE = 64
"""Records of an ArrayRecord file that are read together."""
ROWS = 256
"""Rows of a column file that are unpacked together."""
PART = 2**20
"""Bytes of a JSON list that are read together."""
DECODER = json.JSONDecoder()
LITERAL = 16
"""More characters than a number's name, an escape or `false` has."""
SPACE = re.compile(r"[ \t\n\r]*")


def packages_of(names: Iterable[str]) -> tuple[str, ...]:
    """The package that reads files of such names."""
    return ("pyarrow",) if any(name.lower().endswith(COLUMNS) for name in names) else ()


def record_files(names: tuple[str, ...], cache: str = CACHE) -> list[Path]:
    """The files that the names, globs and folders match; of a folder, such as Hugging Face's `datasets` saves, all its
    files of records. DataError if a name matches nothing, or a file of another format."""
    files: list[Path] = []
    for name in names:
        folder = Path(name).expanduser()
        if not is_remote(name) and folder.is_dir():
            inside = sorted(path for path in folder.iterdir() if _suffix(path) in (*LINES, *COLUMNS, *MEMBERS, *ARRAYS))
            if (folder / "state.json").is_file():  # as `datasets` saves: its caches are not the data
                inside = [path for path in inside if not path.name.startswith("cache-")]
            if not inside:
                raise DataError(f"{name}: this folder has no file of records", HINT)
            words = {re.split(r"[^a-z]", path.name.lower())[0] for path in inside}
            splits = words & set(SPLITS)
            if "train" in splits and len(splits) > 1:
                hint = "name them in data.files and data.test_files: folder/train*, folder/test*"
                raise DataError(f"{name}: this folder has files of several splits: {', '.join(sorted(splits))}", hint)
            for path in inside:
                refuse_pointer(path)
            files += inside
        else:
            files += resolve_files((name,), "records", cache=cache)
    for file in files:
        if not is_record_file(file):
            raise DataError(f"{file}: {file.suffix or 'a file without a suffix'} is no file of records", HINT)
    if not files:
        raise DataError("data.files is empty: name the files to read, for example data.files='[chat.jsonl]'")
    return list(dict.fromkeys(files))


def is_record_file(path: Path) -> bool:
    """Whether a name is that of a file of records."""
    return _suffix(path) in SUFFIXES


def has_record_files(folder: Path) -> bool:
    """Whether there is a file of records in the folder, of a form that `record_files` takes from one."""
    return any(_suffix(path) in (*LINES, *COLUMNS, *MEMBERS, *ARRAYS) for path in folder.iterdir())


def records(path: Path, limits: Limits = LIMITS, fields: Collection[str] | None = None) -> Iterator[Record]:
    """Yield the records of a file; DataError, with its line, for one that is not an object of fields.

    Without `fields`, texts and numbers are read; UNREAD stands for times and binary values. With them, these fields
    are read, binary ones too, as bytes or `Content`; UNREAD may stand for others.
    """
    suffix = _suffix(path)
    with reading(path):
        if suffix in COLUMNS:
            yield from _columns(path, limits, fields)
        elif suffix == ".json":
            yield from _document(path, limits)
        elif suffix in MEMBERS:
            yield from tar_records(path, limits, fields)
        elif suffix in ARRAYS:
            yield from _array_records(path, limits)
        else:
            yield from _lines(path, limits)


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _opened(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # pyright: ignore[reportReturnType]


def _lines(path: Path, limits: Limits) -> Iterator[Record]:
    total = 0
    with _opened(path) as file:
        for number in itertools.count(1):
            where = f"{path}:{number}"
            with reading(where):
                line = file.readline(limits.record + 1)
            if not line:
                return
            total += len(line)
            if len(line) > limits.record:
                raise too_large(where, limits.record, "record")
            if path.suffix == ".gz" and total > limits.file:
                raise too_large(str(path), limits.file, "file")
            if line.strip():
                yield where, object_of(where, line, "write one object per line")


def _document(path: Path, limits: Limits) -> Iterator[Record]:
    """A list of objects; some files that end in .json have one object per line.

    One object at a time is in memory, and no more text than a record may have.
    """
    with _opened(path) as file:
        text = _Text(path, file, limits)
        if text.next_character() != "[":
            yield from _not_a_list(path, limits)
            return
        text.skip()
        for number in itertools.count(1):
            if text.next_character() == "]" and number == 1:
                break
            where = f"{path}: object {number}"
            value, source = text.value(where)
            yield record_of(where, value, HALF.search(source) is not None)
            if (following := text.next_character()) == "]":
                break
            if following != ",":
                raise DataError(f"{where}: is not JSON: no ',' or ']' follows it")
            text.skip()
        text.skip()
        if text.next_character():
            raise DataError(f"{path}: is not JSON: something follows the list")


def _not_a_list(path: Path, limits: Limits) -> Iterator[Record]:
    """The records of a file whose first line is one JSON value and not its last line; DataError otherwise."""
    with _opened(path) as file:
        first = file.readline(limits.record + 1)
        with suppress(ValueError, RecursionError):  # a value over several lines, or no JSON at all
            json.loads(first)
            if file.read(1):
                yield from _lines(path, limits)
                return
        content = first + file.read(limits.record + 1 - len(first))
    if len(content) > limits.record:
        raise DataError(f"{path}: begins with no list of objects", "write a list, or JSON lines, in a file .jsonl")
    try:
        json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON: {reason(error)}") from error
    raise DataError(f"{path}: is not a list of objects", "write a list, or JSON lines with one object per line")


class _Text:
    """The text of a JSON file that is read and decoded in parts."""

    def __init__(self, path: Path, file: BinaryIO, limits: Limits) -> None:
        self._path, self._file, self._limits = path, file, limits
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._most = limits.file if path.suffix == ".gz" else path.stat().st_size
        self._text, self._at, self._read, self._ended = "", 0, 0, False

    def next_character(self) -> str:
        """The next character that is no space, which is not taken; empty at the end."""
        while True:
            self._at = SPACE.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self._at < len(self._text) or not self._more(PART):
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        """Take one character."""
        self._at += 1

    def value(self, where: str) -> tuple[Any, str]:
        """Take a value; also its text."""
        size = PART
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._ended:  # else a number may have more digits
                    source, self._at = self._text[self._at : end], end
                    return value, source
            except RecursionError as error:
                raise DataError(f"{where}: is not JSON: {reason(error)}") from error
            except json.JSONDecodeError as error:
                # text that is cut is wrong at its end, or in a string that does not end
                cut = error.pos > len(self._text) - LITERAL or error.msg.startswith("Unterminated")
                if self._ended or not cut:
                    raise DataError(f"{where}: is not JSON: {reason(error)}") from error
                if len(self._text) - self._at > self._limits.record:
                    raise too_large(where, self._limits.record, "record") from error
            self._more(size)
            size *= 2  # what was not enough is decoded again

    def _more(self, size: int) -> bool:
        """Read so many bytes more; whether there were any."""
        part = self._file.read(size)
        self._read += len(part)
        if self._read > self._most:
            raise too_large(str(self._path), self._most, "file")
        self._ended = not part
        self._text, self._at = self._text[self._at :] + self._decode(part, final=not part), 0
        return bool(part)


def _array_records(path: Path, limits: Limits) -> Iterator[Record]:
    """The records of an ArrayRecord file, each a JSON object."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(path))
    count = reader.num_records()
    if not count and path.stat().st_size:  # the reader does not report another format
        raise DataError(f"{path}: cannot be read as ArrayRecord: it has no record")
    for first in range(0, count, AT_ONCE):
        part = reader.read(first, min(first + AT_ONCE, count))
        for number, content in enumerate(part, first + 1):
            where = f"{path}: record {number}"
            if len(content) > limits.record:
                raise too_large(where, limits.record, "record")
            yield where, object_of(where, content)


def _columns(path: Path, limits: Limits, fields: Collection[str] | None) -> Iterator[Record]:
    number = total = 0
    batches = _parquet(path, limits, fields) if path.suffix.lower() == ".parquet" else _arrow(path)
    schema = next(batches)
    kept = _kept(path, schema, fields)
    unread = dict.fromkeys(
        (name for name in schema.names if name not in kept), UNREAD
    )  # a record has them, so that they are named, or refused
    for batch in batches:
        batch.validate(full=True)  # Arrow trusts the offsets in a file: damaged ones point to other memory
        chosen = batch.select(_kept(path, batch.schema, fields))
        for rows in _in_parts(path, chosen, number, limits):
            with reading(f"{path}: rows {number + 1} to {number + rows.num_rows}"):
                values = rows.to_pylist()
            for row in values:
                number += 1
                yield f"{path}: row {number}", {name: without_nulls(value) for name, value in row.items()} | unread
        total += batch.nbytes
        if total > max(limits.file, path.stat().st_size):
            raise too_large(str(path), limits.file, "file")


def without_nulls(value: Any) -> Any:
    """The value without the null fields of its objects, at every depth: Arrow gives each object the keys of all."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _in_parts(path: Path, batch: Any, number: int, limits: Limits) -> Iterator[Any]:
    """Slices of a batch that have at most the bytes of a record, and at most ROWS rows; `number` rows are before it."""
    waiting = [batch.slice(first, ROWS) for first in range(0, batch.num_rows, ROWS)]
    while waiting:
        rows = waiting.pop(0)
        if rows.nbytes <= limits.record:
            number += rows.num_rows
            yield rows
        elif rows.num_rows == 1:
            raise too_large(f"{path}: row {number + 1}", limits.record, "record")
        else:
            half = rows.num_rows // 2
            waiting[:0] = [rows.slice(0, half), rows.slice(half)]


def _kept(path: Path, schema: Any, fields: Collection[str] | None) -> list[str]:
    """The columns that are read."""
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise DataError(f"{path}: two columns are named {name!r}", "rename one of them")
    return [name for name in schema.names if (_is_text_or_number(schema, name) if fields is None else name in fields)]


def _is_text_or_number(schema: Any, name: str) -> bool:
    """Whether a column can be a part of a conversation. Times and binary values cannot, and not all can be read."""
    import pyarrow.types as kinds

    kind = schema.field(name).type
    return not (kinds.is_temporal(kind) or kinds.is_binary(kind) or kinds.is_large_binary(kind))


def _parquet(path: Path, limits: Limits, fields: Collection[str] | None) -> Iterator[Any]:
    """The schema of the file, then its record batches."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        if group.total_byte_size > limits.record * max(group.num_rows, 1):
            raise too_large(f"{path}: a record of row group {number + 1}", limits.record, "record")
    yield file.schema_arrow
    yield from file.iter_batches(ROWS, columns=_kept(path, file.schema_arrow, fields))


def _arrow(path: Path) -> Iterator[Any]:
    """The schema, then the record batches of the stream format, which `datasets` saves, or of the file format."""
    import pyarrow.ipc

    with path.open("rb") as file:
        whole = file.read(6) == b"ARROW1"
        file.seek(0)
        if whole:
            reader = pyarrow.ipc.open_file(file)
            yield reader.schema
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            stream = pyarrow.ipc.open_stream(file)
            yield stream.schema
            yield from stream
