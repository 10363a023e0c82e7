"""A record of a file: fields by name, each record with where it is, and how large it may be."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.core.errors import DataError
from dtrain.core.types import Positive
from dtrain.data.paths import reason

UNREAD = b""
"""In place of times and of binary values, which are not read."""
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


class Content(NamedTuple):
    """A field whose bytes lie in a file, and are read when they are needed."""

    path: Path
    offset: int
    size: int

    def read(self) -> bytes:
        """The bytes. DataError if the file cannot be read, or ends before them."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                content = file.read(self.size)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error
        if len(content) != self.size:
            raise DataError(f"{self.path}: ends early: it was changed after it was opened")
        return content


def too_large(where: str, most: int, key: str) -> DataError:
    return DataError(f"{where}: has more than {most:,} bytes", f"if that is right, raise data.limits.{key}_mib")


def record_of(where: str, value: Any, halves: bool = False) -> Record:
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


def object_of(where: str, content: bytes, hint: str = "each record must be a JSON object") -> dict[str, Any]:
    try:
        text = content.decode("utf-8-sig")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8: {reason(error)}", "convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON: {reason(error)}", hint) from error
    return record_of(where, value, HALF.search(text) is not None)[1]
