"""A folder of pictures as records: each with its file, its folder, and the caption beside it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dtrain.core.errors import DataError
from dtrain.data.folder_layout import is_hidden, is_picture
from dtrain.data.paths import reading
from dtrain.data.record import LIMITS, Limits, Record, object_of, too_large

BESIDE = (".txt", ".caption", ".json")
"""Suffixes of files that belong to the picture of the same name: its caption, or more fields."""


def has_pictures(folder: Path) -> bool:
    """Whether there is a picture below the folder."""
    return any(is_picture(path.name) for path in folder.rglob("*"))


def picture_records(folder: Path, limits: Limits = LIMITS) -> Iterator[Record]:
    """A record for each picture below the folder, by name. DataError if a file beside one cannot be read.

    `image` is its path below the folder, `folder` the name of the folder that it lies in, `text` its caption, in a .txt
    or .caption file of the same name. A .json file of the same name has further fields.
    """
    for path in sorted(folder.rglob("*")):
        within = path.relative_to(folder).as_posix()
        if not is_picture(path.name) or is_hidden(within):
            continue
        fields = {"image": within, "folder": path.parent.name}
        for suffix in BESIDE:
            beside = path.with_suffix(suffix)
            if not beside.is_file():
                continue
            if beside.stat().st_size > limits.record:
                raise too_large(str(beside), limits.record, "record")
            with reading(beside):
                content = beside.read_bytes()
                own = object_of(str(beside), content) if suffix == ".json" else {"text": content.decode().strip()}
            if twice := own.keys() & fields.keys():
                raise DataError(f"{beside}: {path.name} has a field {min(twice)!r} already", "name it differently")
            fields |= own
        yield str(path), fields


def left_out(folder: Path) -> Counter[str]:
    """Numbers of the files that belong to no picture, by suffix."""
    found = [
        path for path in folder.rglob("*") if path.is_file() and not is_hidden(path.relative_to(folder).as_posix())
    ]
    pictures = {path.with_suffix("") for path in found if is_picture(path.name)}
    return Counter(
        path.suffix.lower() or "without a suffix"
        for path in found
        if not is_picture(path.name) and not (path.suffix in BESIDE and path.with_suffix("") in pictures)
    )
