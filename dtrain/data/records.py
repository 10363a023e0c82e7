"""Records of files: JSON, JSON lines, Parquet, Arrow, WebDataset, ArrayRecord; each with where it is."""

import gzip
import json
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError
from dtrain.data.files import CACHE, is_remote, matching, reason

LINES = (".jsonl", ".ndjson")
COLUMNS = (".parquet", ".arrow", ".feather")
MEMBERS = (".tar",)
"""WebDataset: consecutive members of one name, up to its first dot, are one record."""
ARRAYS = (".array_record", ".arrayrecord")
SUFFIXES = (".json", *LINES, *COLUMNS, *MEMBERS, *ARRAYS)
HINT = f"such files end in {', '.join(SUFFIXES)}; .json, .jsonl and .tar may be compressed, too (.gz)"

AT_ONCE = 1024
"""Records of an ArrayRecord file that are read together."""

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


def records(path: Path) -> Iterator[Record]:
    """Yield the records of a file; DataError, with its line, for one that is not an object of fields."""
    suffix = _suffix(path)
    try:
        if suffix in COLUMNS:
            yield from _columns(path)
        elif suffix == ".json":
            yield from _document(path)
        elif suffix in MEMBERS:
            yield from _members(path)
        elif suffix in ARRAYS:
            yield from _array_records(path)
        else:
            yield from _lines(path)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from error


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _text(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _lines(path: Path) -> Iterator[Record]:
    with _text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _record(f"{path}:{number}", json.loads(line))
                except ValueError as error:
                    raise DataError(
                        f"{path}:{number}: is not JSON: {reason(error)}", "write one object per line"
                    ) from error


def _document(path: Path) -> Iterator[Record]:
    """A list of objects; some files that end in .json have one object per line."""
    with _text(path) as file:
        text = file.read()
    try:
        values = json.loads(text)
    except ValueError as error:
        if "Extra data" in str(error):
            yield from _lines(path)
            return
        raise DataError(f"{path}: is not JSON: {reason(error)}") from error
    if not isinstance(values, list):
        raise DataError(f"{path}: is not a list of objects", "write a list, or JSON lines with one object per line")
    for number, value in enumerate(values, 1):
        yield _record(f"{path}: object {number}", value)


def _record(where: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{where}: is {type(value).__name__}, not an object with fields")
    return where, value


def _members(path: Path) -> Iterator[Record]:
    """The records of a WebDataset tar: the fields of a .json member, the text of a .txt member as `text`; members with
    other suffixes, such as images, are left out."""
    key, fields = "", {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                if not member.isfile() or suffix not in ("json", "txt"):
                    continue
                if fields and key != f"{folder}/{stem}":
                    yield f"{path}: {key.lstrip('/')}", fields
                    fields = {}
                key, file = f"{folder}/{stem}", tar.extractfile(member)
                content = file.read() if file else b""
                own = {"text": content.decode()} if suffix == "txt" else _object(f"{path}: {member.name}", content)
                fields = {**fields, **own}
            # tarfile takes a damaged header for the end, which is a block of zeros
            end: Any = tar.fileobj
            end.seek(tar.offset)
            if end.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise DataError(f"{path}: is damaged or ends early, after {key.lstrip('/') or 'no record'}")
    except (tarfile.TarError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as tar: {reason(error)}") from error
    if fields:
        yield f"{path}: {key.lstrip('/')}", fields


def _array_records(path: Path) -> Iterator[Record]:
    """The records of an ArrayRecord file, each a JSON object."""
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(path))
        count = reader.num_records()
        if not count and path.stat().st_size:  # the reader does not report another format
            raise ValueError("it has no record")
        for first in range(0, count, AT_ONCE):
            part = reader.read(first, min(first + AT_ONCE, count))
            for number, content in enumerate(part, first + 1):
                where = f"{path}: record {number}"
                yield where, _object(where, content)
    except (RuntimeError, ValueError, IndexError) as error:
        raise DataError(f"{path}: cannot be read as ArrayRecord: {reason(error)}") from error


def _object(where: str, content: bytes) -> dict[str, Any]:
    try:
        return _record(where, json.loads(content))[1]
    except ValueError as error:
        raise DataError(f"{where}: is not JSON: {reason(error)}", "each record must be a JSON object") from error


def _columns(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    number = 0
    try:
        if path.suffix.lower() == ".parquet":
            batches: Any = pyarrow.parquet.ParquetFile(path).iter_batches()
        else:
            batches = _arrow(path)
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: cannot be read after row {number}: {reason(error)}") from error


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
