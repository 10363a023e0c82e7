"""A folder of pictures as records: each with its file, its folder, and the caption beside it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dtrain.core.errors import DataError
from dtrain.data.folder_layout import SPLITS, is_hidden, is_picture, paths_below
from dtrain.data.paths import reading
from dtrain.data.record import LIMITS, Limits, Record, object_of, too_large

BESIDE = (".txt", ".caption", ".json")
"""Suffixes of files that belong to the picture of the same name: its caption, or more fields."""


def has_pictures(folder: Path) -> bool:
    """Whether there is a picture below the folder."""
    return any(is_picture(path.name) for path in paths_below(folder))


def picture_records(folder: Path, limits: Limits = LIMITS) -> Iterator[Record]:
    """A record for each picture below the folder, by name. DataError if a file beside one cannot be read.

    `image` is its path below the folder, `folder` the name of the folder below that it lies in, `text` its caption, in
    a .txt or .caption file of the same name. A .json file of the same name has further fields.
    """
    found = {path.relative_to(folder).as_posix(): path for path in paths_below(folder)}
    beside = {_without_case(path): path for path in found.values()}
    tops = {within.partition("/")[0] for within in found if "/" in within and is_picture(within)}
    if splits := sorted(top for top in tops if top.lower() in SPLITS):
        hint = f"name them apart: data.files: [{folder / splits[0]}], and data.test_files"
        raise DataError(f"{folder}: has folders that are called like splits: {', '.join(splits)}", hint)
    for within, path in sorted(found.items()):
        if not is_picture(path.name) or is_hidden(within):
            continue
        fields = {"image": within, "folder": path.parent.name if path.parent != folder else ""}
        for suffix in BESIDE:
            own_file = beside.get(_without_case(path.with_suffix(suffix)))
            if own_file is None:
                continue
            if own_file.stat().st_size > limits.record:
                raise too_large(str(own_file), limits.record, "record")
            with reading(own_file):
                content = own_file.read_bytes()
                is_json = suffix == ".json"
                own = object_of(str(own_file), content) if is_json else {"text": content.decode("utf-8-sig").strip()}
            if twice := own.keys() & fields.keys():
                raise DataError(f"{own_file}: {path.name} has a field {min(twice)!r} already", "name it differently")
            fields |= own
        yield str(path), fields


def left_out(folder: Path) -> Counter[str]:
    """Numbers of the files that belong to no picture, by suffix."""
    found = [path for path in paths_below(folder) if not is_hidden(path.relative_to(folder).as_posix())]
    pictures = {path.with_suffix("") for path in found if is_picture(path.name)}
    return Counter(
        path.suffix.lower() or "without a suffix"
        for path in found
        if not is_picture(path.name) and not (path.suffix.lower() in BESIDE and path.with_suffix("") in pictures)
    )


def _without_case(path: Path) -> str:
    """A path by which a file is found whose suffix is in capitals."""
    return f"{path.with_suffix('')}{path.suffix.lower()}"
