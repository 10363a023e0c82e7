"""Records of WebDataset tars: consecutive members of one name, up to its first dot, are one record."""

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dtrain.core.errors import DataError
from dtrain.data.folder_layout import is_hidden
from dtrain.data.paths import reading
from dtrain.data.record import UNREAD, Content, Limits, Record, object_of, too_large

COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
"""How a tar that was compressed is opened, by its first bytes."""


def tar_records(path: Path, limits: Limits, fields: Collection[str] | None = None) -> Iterator[Record]:
    """Yield the records of a tar: the fields of a .json member, the text of a .txt member as `text`.

    Without `fields`, members of other suffixes are left out. With them, such a member is a field named like its suffix,
    `jpg` or `seg.png`: one of `fields` as `Content`, or as bytes from a compressed tar, and UNREAD otherwise.
    """
    key, found = "", {}
    with _unpacked(path) as file, tarfile.open(fileobj=_Bounded(path, file, limits), mode="r:") as tar:  # pyright: ignore
        plain = isinstance(file, io.BufferedReader)
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            stem, _, suffix = name.partition(".")
            suffix = suffix.lower() if suffix.lower() in ("json", "txt") else suffix
            if tar.offset > max(limits.file, path.stat().st_size):
                raise too_large(str(path), limits.file, "file")
            link = member.islnk() or member.issym()
            if not (member.isfile() or link) or (fields is None and suffix not in ("json", "txt")):
                continue
            if fields is not None and is_hidden(member.name.removeprefix("./")):
                continue
            if member.size > limits.record:
                raise too_large(f"{path}: {member.name}", limits.record, "record")
            if found and key != f"{folder}/{stem}":
                yield f"{path}: {key.lstrip('/')}", found
                found = {}
            key, where = f"{folder}/{stem}", f"{path}: {member.name}"
            with reading(where):
                own = _field(where, tar, member, suffix, fields, path if plain and not link else None, limits)
            if fields is not None and (twice := own.keys() & found.keys()):
                raise DataError(f"{where}: its record has a field {min(twice)!r} already", "name them differently")
            found = {**found, **own}
        # tarfile takes a damaged header for the end, which is a block of zeros
        end: Any = tar.fileobj
        end.seek(tar.offset)
        if end.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise DataError(f"{path}: is damaged or ends early, after {key.lstrip('/') or 'no record'}")
    if found:
        yield f"{path}: {key.lstrip('/')}", found


def _field(
    where: str,
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    suffix: str,
    fields: Collection[str] | None,
    plain: Path | None,
    limits: Limits,
) -> dict[str, Any]:
    """What a member adds to its record. `plain`: the file of the tar, if the member's bytes can be read from there."""
    if suffix not in ("json", "txt"):
        name = suffix.lower()
        if name not in (fields or ()):
            return {name: UNREAD}
        if plain and member.sparse is None:
            return {name: Content(plain, member.offset_data, member.size)}
    opened = tar.extractfile(member)  # of a link, what it points to
    content = opened.read(limits.record + 1) if opened else b""
    if len(content) > limits.record:
        raise too_large(where, limits.record, "record")
    if suffix == "json":
        return object_of(where, content)
    if suffix == "txt":
        text = content.decode("utf-8-sig")
        return {"text": text if fields is None else text.strip()}
    return {suffix.lower(): content}


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
            raise too_large(f"{self._path}: a header", self._limits.record, "record")
        return self._file.read(size)
