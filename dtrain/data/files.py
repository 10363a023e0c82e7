"""The files that names and globs stand for."""

import glob
from pathlib import Path

from dtrain.errors import DataError

PACKAGE = "{dtrain}"
"""Stands for the folder in which dtrain itself is installed."""


def matching(names: tuple[str, ...], what: str) -> list[Path]:
    """Every file that is named, in the order of the names and sorted within each; DataError names what is missing."""
    found: list[Path] = []
    for name in names:
        pattern = str(Path(name.replace(PACKAGE, str(Path(__file__).parents[1]))).expanduser())
        matched = [path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if path.is_file()]  # noqa: PTH207
        if not matched:
            hint = "paths are relative to where dtrain starts; ** stands for any folders"
            raise DataError(f"no file of {what} matches {name}", hint)
        found += [path for path in matched if path not in found]
    if not found:
        raise DataError(f"data.files names no file of {what}")
    return found
