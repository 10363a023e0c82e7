"""Records of files: JSON, JSON lines, Parquet, Arrow, WebDataset, ArrayRecord; each with where it is."""

import bz2
import codecs
import gzip
import itertools
import json
import lzma
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dtrain.core.errors import DataError
from dtrain.core.files import refuse_pointer
from dtrain.core.types import Positive
from dtrain.data.files import resolve_files
from dtrain.data.paths import CACHE, is_remote, reading, reason

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
UNREAD = b""
"""In place of times and of binary values, which are not read."""
ROWS = 256
"""Rows of a column file that are unpacked together."""
PART = 2**20
"""Bytes of a JSON list that are read together."""
COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
"""How a tar that was compressed is opened, by its first bytes."""
DECODER = json.JSONDecoder()
LITERAL = 16
"""More characters than a number's name, an escape or `false` has."""
SPACE = re.compile(r"[ \t\n\r]*")
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON writes one half of a character beyond the first 65,536."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a file of others may unpack to: a small compressed one may hold more than the memory does."""

    record_mib: Positive = 64
    """Most MiB of one record."""
    file_mib: Positive = 4096
    """Most MiB of one compressed file, unpacked."""

    @property
    def record(self) -> int:
        """Most bytes of one record."""
        return self.record_mib * 2**20

    @property
    def file(self) -> int:
        """Most bytes of one compressed file, unpacked."""
        return self.file_mib * 2**20


LIMITS = Limits()

Record = tuple[str, dict[str, Any]]
"""Where a record is, "chat.jsonl:12", and its fields."""


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
        if _suffix(file) not in SUFFIXES:
            raise DataError(f"{file}: {file.suffix or 'a file without a suffix'} is no file of records", HINT)
    if not files:
        raise DataError("data.files is empty: name the files to read, for example data.files='[chat.jsonl]'")
    return list(dict.fromkeys(files))


def records(path: Path, limits: Limits = LIMITS) -> Iterator[Record]:
    """Yield the records of a file; DataError, with its line, for one that is not an object of fields."""
    suffix = _suffix(path)
    with reading(path):
        if suffix in COLUMNS:
            yield from _columns(path, limits)
        elif suffix == ".json":
            yield from _document(path, limits)
        elif suffix in MEMBERS:
            yield from _members(path, limits)
        elif suffix in ARRAYS:
            yield from _array_records(path, limits)
        else:
            yield from _lines(path, limits)


def _too_large(where: str, most: int, key: str) -> DataError:
    return DataError(f"{where}: has more than {most:,} bytes", f"if that is right, raise data.limits.{key}_mib")


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
                raise _too_large(where, limits.record, "record")
            if path.suffix == ".gz" and total > limits.file:
                raise _too_large(str(path), limits.file, "file")
            if line.strip():
                yield where, _object(where, line, "write one object per line")


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
            yield _record(where, value, HALF.search(source) is not None)
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
                    raise _too_large(where, self._limits.record, "record") from error
            self._more(size)
            size *= 2  # what was not enough is decoded again

    def _more(self, size: int) -> bool:
        """Read so many bytes more; whether there were any."""
        part = self._file.read(size)
        self._read += len(part)
        if self._read > self._most:
            raise _too_large(str(self._path), self._most, "file")
        self._ended = not part
        self._text, self._at = self._text[self._at :] + self._decode(part, final=not part), 0
        return bool(part)


def _record(where: str, value: Any, halves: bool = False) -> Record:
    """The record. DataError if it is no object, or, with `halves`, if it has one half of a character."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: is {type(value).__name__}, not an object with fields")
    if halves:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            message = f"{where}: has half of a character (a lone surrogate), which no text can have"
            raise DataError(message, "repair or remove it: some scrapers cut emoji in two") from error
    return where, value


def _members(path: Path, limits: Limits) -> Iterator[Record]:
    """The records of a WebDataset tar: the fields of a .json member, the text of a .txt member as `text`; members with
    other suffixes, such as images, are left out."""
    key, fields = "", {}
    with _unpacked(path) as file, tarfile.open(fileobj=_Bounded(path, file, limits), mode="r:") as tar:  # pyright: ignore
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            stem, _, suffix = name.partition(".")
            if tar.offset > max(limits.file, path.stat().st_size):
                raise _too_large(str(path), limits.file, "file")
            if not member.isfile() or suffix not in ("json", "txt"):
                continue
            if member.size > limits.record:
                raise _too_large(f"{path}: {member.name}", limits.record, "record")
            if fields and key != f"{folder}/{stem}":
                yield f"{path}: {key.lstrip('/')}", fields
                fields = {}
            key, file = f"{folder}/{stem}", tar.extractfile(member)
            content, where = file.read() if file else b"", f"{path}: {member.name}"
            with reading(where):
                own = {"text": content.decode()} if suffix == "txt" else _object(where, content)
            fields = {**fields, **own}
        # tarfile takes a damaged header for the end, which is a block of zeros
        end: Any = tar.fileobj
        end.seek(tar.offset)
        if end.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise DataError(f"{path}: is damaged or ends early, after {key.lstrip('/') or 'no record'}")
    if fields:
        yield f"{path}: {key.lstrip('/')}", fields


def _unpacked(path: Path) -> BinaryIO:
    """The file as it is before it was compressed, if it was."""
    with path.open("rb") as file:
        start = file.read(6)
    opened = next((opened for magic, opened in COMPRESSED.items() if start.startswith(magic)), Path.open)
    return opened(path, "rb")  # pyright: ignore


class _Bounded:
    """A file of which nobody reads more than a record at once: tarfile reads a header whole, whatever its size."""

    def __init__(self, path: Path, file: BinaryIO, limits: Limits) -> None:
        self._path, self._file, self._limits = path, file, limits
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int) -> bytes:
        """Read so many bytes. DataError if these are more than a record may have."""
        if size > self._limits.record:
            raise _too_large(f"{self._path}: a header", self._limits.record, "record")
        return self._file.read(size)


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
                raise _too_large(where, limits.record, "record")
            yield where, _object(where, content)


def _object(where: str, content: bytes, hint: str = "each record must be a JSON object") -> dict[str, Any]:
    try:
        text = content.decode("utf-8-sig")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8: {reason(error)}", "convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON: {reason(error)}", hint) from error
    return _record(where, value, HALF.search(text) is not None)[1]


def _columns(path: Path, limits: Limits) -> Iterator[Record]:
    number = total = 0
    batches = _parquet(path, limits) if path.suffix.lower() == ".parquet" else _arrow(path)
    schema = next(batches)
    kept = _kept(path, schema)
    unread = dict.fromkeys(
        (name for name in schema.names if name not in kept), UNREAD
    )  # a record has them, so that they are named, or refused
    for batch in batches:
        batch.validate(full=True)  # Arrow trusts the offsets in a file: damaged ones point to other memory
        chosen = batch.select(_kept(path, batch.schema))
        for rows in _in_parts(path, chosen, number, limits):
            with reading(f"{path}: rows {number + 1} to {number + rows.num_rows}"):
                values = rows.to_pylist()
            for row in values:
                number += 1
                yield f"{path}: row {number}", {name: without_nulls(value) for name, value in row.items()} | unread
        total += batch.nbytes
        if total > max(limits.file, path.stat().st_size):
            raise _too_large(str(path), limits.file, "file")


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
            raise _too_large(f"{path}: row {number + 1}", limits.record, "record")
        else:
            half = rows.num_rows // 2
            waiting[:0] = [rows.slice(0, half), rows.slice(half)]


def _kept(path: Path, schema: Any) -> list[str]:
    """The columns that are read."""
    return [name for name in dict.fromkeys(schema.names) if _is_text_or_number(path, schema, name)]


def _is_text_or_number(path: Path, schema: Any, name: str) -> bool:
    """Whether a column can be a part of a conversation. Times and binary values cannot, and not all can be read."""
    import pyarrow.types as kinds

    if schema.names.count(name) > 1:
        raise DataError(f"{path}: two columns are named {name!r}", "rename one of them")
    kind = schema.field(name).type
    return not (kinds.is_temporal(kind) or kinds.is_binary(kind) or kinds.is_large_binary(kind))


def _parquet(path: Path, limits: Limits) -> Iterator[Any]:
    """The schema of the file, then its record batches."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        if group.total_byte_size > limits.record * max(group.num_rows, 1):
            raise _too_large(f"{path}: a record of row group {number + 1}", limits.record, "record")
    yield file.schema_arrow
    yield from file.iter_batches(ROWS, columns=_kept(path, file.schema_arrow))


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
