"""Records of files: JSON, JSON lines, Parquet, Arrow, WebDataset, ArrayRecord; each with where it is."""

import gzip
import itertools
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dtrain.core.errors import DataError
from dtrain.core.types import Positive
from dtrain.data.files import CACHE, is_remote, matching, reading, reason

LINES = (".jsonl", ".ndjson")
COLUMNS = (".parquet", ".arrow", ".feather")
MEMBERS = (".tar",)
"""WebDataset: consecutive members of one name, up to its first dot, are one record."""
ARRAYS = (".array_record", ".arrayrecord")
SUFFIXES = (".json", *LINES, *COLUMNS, *MEMBERS, *ARRAYS)
HINT = f"such files end in {', '.join(SUFFIXES)}; .json, .jsonl and .tar may be compressed, too (.gz)"

AT_ONCE = 1024
"""Records of an ArrayRecord file that are read together."""
ROWS = 256
"""Rows of a column file that are unpacked together."""
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


def record_files(names: tuple[str, ...], cache: str = CACHE) -> list[Path]:
    """The files that the names, globs and folders match; of a folder, such as Hugging Face's `datasets` saves, all its
    files of records. DataError if a name matches nothing, or a file of another format."""
    files: list[Path] = []
    for name in names:
        folder = Path(name).expanduser()
        if not is_remote(name) and folder.is_dir():
            inside = sorted(path for path in folder.iterdir() if _suffix(path) in (*LINES, *COLUMNS, *MEMBERS, *ARRAYS))
            if not inside:
                raise DataError(f"{name}: this folder has no file of records", HINT)
            files += inside
        else:
            files += matching((name,), "records", cache=cache)
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
            yield from _array_records(path)
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
    """A list of objects; some files that end in .json have one object per line."""
    most = limits.file if path.suffix == ".gz" else path.stat().st_size
    content = bytearray()
    with _opened(path) as file:
        while part := file.read(2**20):  # not all at once, for which the file object takes the memory first
            content += part
            if len(content) > most:
                raise _too_large(str(path), most, "file")
    try:
        values = json.loads(content)
    except ValueError as error:
        if "Extra data" in str(error):
            yield from _lines(path, limits)
            return
        raise DataError(f"{path}: is not JSON: {reason(error)}") from error
    if not isinstance(values, list):
        raise DataError(f"{path}: is not a list of objects", "write a list, or JSON lines with one object per line")
    halves = HALF.search(content.decode()) is not None
    for number, value in enumerate(values, 1):
        yield _record(f"{path}: object {number}", value, halves)


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
    with tarfile.open(path) as tar:
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


def _array_records(path: Path) -> Iterator[Record]:
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
    number = 0
    batches = _parquet(path, limits) if path.suffix.lower() == ".parquet" else _arrow(path)
    for batch in batches:
        batch.validate(full=True)  # Arrow trusts the offsets in a file: damaged ones point to other memory
        kept = [name for name in dict.fromkeys(batch.schema.names) if _is_text_or_number(path, batch.schema, name)]
        for first in range(0, batch.num_rows, ROWS):
            with reading(f"{path}: rows {number + 1} to {number + ROWS}"):
                rows = batch.select(kept).slice(first, ROWS).to_pylist()
            for row in rows:
                number += 1
                yield f"{path}: row {number}", row


def _is_text_or_number(path: Path, schema: Any, name: str) -> bool:
    """Whether a column can be a part of a conversation. Times and binary values cannot, and not all can be read."""
    import pyarrow.types as kinds

    if schema.names.count(name) > 1:
        raise DataError(f"{path}: two columns are named {name!r}", "rename one of them")
    kind = schema.field(name).type
    return not (kinds.is_temporal(kind) or kinds.is_binary(kind) or kinds.is_large_binary(kind))


def _parquet(path: Path, limits: Limits) -> Iterator[Any]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        if group.total_byte_size > limits.record * max(group.num_rows, 1):
            raise _too_large(f"{path}: a record of row group {number + 1}", limits.record, "record")
    schema = file.schema_arrow
    kept = [name for name in dict.fromkeys(schema.names) if _is_text_or_number(path, schema, name)]
    return file.iter_batches(ROWS, columns=kept)


def _arrow(path: Path) -> Iterator[Any]:
    """Record batches of the stream format, which `datasets` saves, or of the file format."""
    import pyarrow.ipc

    with path.open("rb") as file:
        whole = file.read(6) == b"ARROW1"
        file.seek(0)
        if whole:
            reader = pyarrow.ipc.open_file(file)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(file)
