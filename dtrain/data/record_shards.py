"""The columns of a file of records, read once and kept as arrays that are mapped into memory.

What a file gives is kept in a folder of the cache whose name is a hash of all that it depends on: the file's content
and form, the columns, the limits. So an interrupted start keeps the files that are done, and files that are added are
read alone.
"""

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dtrain.core.errors import DataError, EnvironmentFault, cause
from dtrain.core.files import file_lock
from dtrain.core.types import JsonObject
from dtrain.data.columns import INSIDE, NAMED, Column, Unfit, class_text
from dtrain.data.digest_cache import NO_CACHE, cached_by_file, file_digest, file_stamp, read_sealed, write_sealed
from dtrain.data.image_files import Head, head_of
from dtrain.data.paths import expand_path, reason
from dtrain.data.record import Content, Record

VERSION = 1
"""Of the folders: a change of what is kept makes them again."""
ABOUT, KEYS, CONTENT = "about.json", "keys.bin", "content.bin"
SHOWN = 20
"""Most problems, and names, that are kept or shown."""


@dataclass(frozen=True)
class Mapped:
    """An array in a file. Pickling keeps where it is."""

    path: Path
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def values(self) -> np.ndarray:
        """The array, mapped into memory. DataError if the file is gone."""
        if not np.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        try:
            return np.asarray(np.memmap(self.path, self.dtype, "r", shape=self.shape))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: cannot be read: {reason(error)}", "run the same command again") from error

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "values"}


@dataclass(frozen=True)
class Shard:
    """What is kept of a file of records."""

    file: Path
    root: Path
    """The folder from which names of pictures start."""
    digest: str
    """Of the file."""
    folder: Path
    about: JsonObject
    """count, texts of each column of labels, fields without a column, problems, and what was counted."""
    columns: Mapping[str, Column]
    stamp: tuple[int, ...] = ()
    """Size and modification time of the file when it was opened, if pictures are read from it."""
    temporary: Any = field(default=None, compare=False)
    """Deletes the folder when it is no longer used, if it is not in a cache."""

    def __len__(self) -> int:
        return self.about["count"]

    @cached_property
    def arrays(self) -> dict[str, Mapped]:
        """What is kept of each column, (records, ...)."""
        kept = [(name, column.kept) for name, column in self.columns.items()]
        return {
            name: Mapped(self.folder / _file_name(number), dtype, (len(self), *shape))
            for number, (name, (shape, dtype)) in enumerate(kept)
        }

    @cached_property
    def keys(self) -> np.ndarray:
        """A hash of each record (records,), uint64: equal for records that belong together."""
        return Mapped(self.folder / KEYS, "uint64", (len(self),)).values

    @cached_property
    def _content(self) -> Mapped:
        return Mapped(self.folder / CONTENT, "uint8", (self.about["content"],))

    def text(self, place: Sequence[int]) -> str:
        """The text that was kept at a place: the name of a file."""
        return os.fsdecode(self._bytes(place))

    @property
    def problems(self) -> list[str]:
        """Why some of its records cannot be used, each with its place."""
        return [f"{self.file}{one}" if one[:1] in (":", "/") else one for one in self.about["problems"]]

    def content(self, place: Sequence[int]) -> bytes:
        """The bytes of a picture that is not a file of its own."""
        where, start, size = (int(number) for number in place)
        return Content(self.file, start, size).read() if where == INSIDE else self._bytes(place)

    def changed(self) -> str:
        """How the file changed after it was opened; empty if it did not, or if it is not read any more."""
        same = not self.stamp or tuple(file_stamp(self.file)[:2]) == self.stamp
        return "" if same else f"{self.file}: was modified or replaced after it was opened"

    def _bytes(self, place: Sequence[int]) -> bytes:
        _, start, size = (int(number) for number in place)
        return self._content.values[start : start + size].tobytes()

    def __getstate__(self) -> dict[str, object]:
        kept = ("file", "root", "digest", "folder", "about", "columns", "stamp")
        return {"temporary": None, **{name: self.__dict__[name] for name in kept}}


def kept_shard(
    file: Path,
    root: Path,
    digest: str,
    read: Iterable[Record],
    columns: Mapping[str, Column],
    group: str | None,
    cache: str,
) -> Shard:
    """The columns of a file, from the cache if it has them; `read` gives its records.

    `root`: where names of pictures start. `digest`: of the file; after a space, what else its records depend on.
    DataError if the file is damaged, EnvironmentFault if the cache cannot be written.
    """
    content = digest.partition(" ")[0]
    made_by = [(name, column.field, column.made_by) for name, column in columns.items()]
    name = hashlib.sha256(repr((VERSION, digest, made_by, group)).encode()).hexdigest()[:24]
    folder = expand_path(cache) / "records" / name
    try:
        if cache == NO_CACHE:
            temporary = _Temporary()
            about = _write(file, temporary.path, read, columns, group)
            return Shard(file, root, content, temporary.path, about, columns, _stamp(file, about), temporary)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(folder):
            about = _verified(folder, cache)
            if about is None:
                shutil.rmtree(folder, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=folder.parent) as new:
                    about = _write(file, Path(new), read, columns, group)
                    Path(new).rename(folder)
                    Path(new).mkdir()  # for the context, which deletes it
    except OSError as error:
        hint = "set data.cache to a folder that you can write to"
        raise EnvironmentFault(f"cannot write the cache of records {folder}: {cause(error)}", hint) from error
    return Shard(file, root, content, folder, about, columns, _stamp(file, about))


class _Temporary:
    """A folder that is deleted with this object, or at the end of the process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="dtrain-records-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def _stamp(file: Path, about: JsonObject) -> tuple[int, ...]:
    return tuple(file_stamp(file)[:2]) if about["inside"] else ()


def _verified(folder: Path, cache: str) -> JsonObject | None:
    """What is written about a folder, if its files are as they were written."""
    about = read_sealed(folder / ABOUT)
    if about is None:
        return None
    paths = [folder / name for name in about["digests"]]
    if not all(path.is_file() for path in paths):
        return None
    found = cached_by_file(cache, "records", paths, file_digest)
    return about if found == list(about["digests"].values()) else None


def _write(
    file: Path, folder: Path, read: Iterable[Record], columns: Mapping[str, Column], group: str | None
) -> JsonObject:
    """Write what is kept of the records of a file; what is written about it."""
    with ExitStack() as files:
        writing = _Writing(file, folder, columns, group, files)
        for where, fields in read:
            writing.add(where, fields)
    names = [*(_file_name(number) for number in range(len(columns))), KEYS, CONTENT]
    about = writing.about() | {"digests": {name: file_digest(folder / name) for name in names}}
    write_sealed(folder / ABOUT, about)
    return about


def _file_name(number: int) -> str:
    return f"column-{number}.bin"


def _digest(value: Any) -> bytes:
    """A hash of a value, whatever form of file it is from."""
    plain = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=repr).encode()
    return hashlib.sha256(plain).digest()


class _Writing:
    """The files of a shard while its records are read."""

    def __init__(
        self, file: Path, folder: Path, columns: Mapping[str, Column], group: str | None, files: ExitStack
    ) -> None:
        def opened(name: str) -> BinaryIO:
            return files.enter_context((folder / name).open("wb"))

        self._file, self._columns, self._group = file, columns, group
        self._files = [opened(_file_name(number)) for number in range(len(columns))]
        self._keys, self.content, self.size = opened(KEYS), opened(CONTENT), 0
        self._count = 0
        self.stores = {name: _ColumnStore(self) for name in columns}
        self._problems: list[str] = []
        self._refused = 0
        self._named = False
        """Whether a picture is a file of its own."""
        self._inside = False
        """Whether the bytes of a picture are read from the file of records."""
        self._unused: Counter[str] = Counter()

    def add(self, where: str, fields: Mapping[str, Any]) -> None:
        """Keep a record, or the reason why it cannot be used."""
        used = {column.field or name for name, column in self._columns.items()} | {self._group}
        self._unused.update(name for name in fields if name not in used)
        kept: list[bytes] = []
        size, key, values = self.size, None, []
        for store in self.stores.values():
            store.pending.clear()
        for name, column in self._columns.items():
            wanted = column.field or name
            value = fields.get(wanted)
            try:
                if value is None:
                    other = ", ".join(map(str, list(fields)[:SHOWN]))
                    raise Unfit(f"is {'null' if wanted in fields else f'missing; it has {other}'}")
                if isinstance(value, Content) and not column.pictures:
                    value = value.read()
                row = np.asarray(column.keep(value, self.stores[name]), column.kept.dtype)
                if column.pictures:
                    picture, head = self._looked_at(row.tolist(), value)
                    key = key or picture
                    self.stores[name].pending += [] if head is None else special(head)
                values.append(value)
            except Unfit as error:
                return self._refuse(where, wanted, error, size)
            kept.append(row.tobytes())
        if self._group is not None:
            value = fields.get(self._group)
            try:
                if value is None:
                    raise Unfit("is missing, by which records are held out")
                key = _hash(class_text(value.read() if isinstance(value, Content) else value).encode())
            except Unfit as error:
                return self._refuse(where, self._group, error, size)
        for store in self.stores.values():
            store.counts.update(store.pending)
        for file, content in zip(self._files, kept, strict=True):
            file.write(content)
        self._keys.write(key or _hash(b"".join(map(_digest, values))))
        self._count += 1
        return None

    def _refuse(self, where: str, name: str, error: Unfit, size: int) -> None:
        where = where.removeprefix(str(self._file))  # which may be elsewhere when this is read again
        self._problems += [f"{where}: {name} {error}"] if len(self._problems) < SHOWN else []
        self._refused += 1
        self.content.seek(size)  # what was kept of this record is of no use
        self.size = size

    def _looked_at(self, place: Sequence[int], value: Any) -> tuple[bytes, Head | None]:
        """The hash of a picture, and its header if it is not a file of its own. Raises Unfit if it cannot be used."""
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if place[0] == NAMED:
            self._named = True
            return _hash(os.fsencode(os.path.normpath(value))), None
        self._inside |= place[0] == INSIDE
        content = value.read() if isinstance(value, Content) else value
        head = head_of(content)
        if head.problem:
            raise Unfit(head.problem)
        return _hash(content), head

    def about(self) -> JsonObject:
        """What is written about the files, but their digests."""
        return {
            "count": self._count,
            "content": self.size,
            "inside": self._inside,
            "named": self._named,
            "texts": {name: list(store.texts) for name, store in self.stores.items()},
            "counts": {name: dict(store.counts) for name, store in self.stores.items()},
            "unused": dict(self._unused),
            "refused": self._refused,
            "problems": self._problems,
        }


class _ColumnStore:
    """Where a column puts what is no number."""

    def __init__(self, writing: _Writing) -> None:
        self._writing = writing
        self.texts: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.pending: list[str] = []
        """What is counted if the record is kept."""

    def append(self, content: bytes) -> tuple[int, int]:
        start = self._writing.size
        self._writing.content.write(content)
        self._writing.size += len(content)
        return start, len(content)

    def number(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def count(self, what: str) -> None:
        self.pending.append(what)


TURNED = "are turned as their EXIF data says"
CLEAR = "have transparent pixels, over the background"
SEVERAL = "have several frames, of which the first is used"


def special(head: Head) -> Iterator[str]:
    """What a user should know about a picture."""
    for what, so in ((TURNED, head.turned), (CLEAR, head.alpha), (SEVERAL, head.frames > 1)):
        if so:
            yield what


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:8]
