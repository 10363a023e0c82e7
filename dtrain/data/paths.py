"""Names of files in a recipe, and errors of libraries that read bytes of others."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtrain.core.errors import DataError, DtrainError, missing_package

PACKAGE = "{dtrain}"
"""Placeholder for the folder of the installed dtrain package."""


def expand_path(name: str) -> Path:
    """The path for a name in a recipe, with {dtrain} and ~ replaced; DataError if it is not a valid path."""
    try:
        path = Path(name.replace(PACKAGE, str(Path(__file__).parents[1]))).expanduser()
    except RuntimeError as error:
        hint = "write the full path, or ~/ for your own home folder"
        raise DataError(f"{name}: this machine has no such user", hint) from error
    if "\0" in name:
        raise DataError(f"{name!r} is not a valid path: it contains a NUL character")
    return path


CACHE = "~/.cache/dtrain"
"""Default folder for copies, tokens and digests of files."""


def is_remote(name: str) -> bool:
    """Whether a name is an address in object storage, such as gs://bucket/file."""
    return bool(re.match(r"[a-z][a-z0-9+.-]*://", name))


def refuse_suffix(path: Path, what: str, formats: dict[str, str]) -> None:
    """DataError if the suffix of a file belongs to another format; `formats` maps such suffixes to hints."""
    hint = formats.get(path.suffix.lower())
    if hint is not None:
        raise DataError(f"{path}: {path.suffix} is not {what}", hint)


def reason(error: BaseException) -> str:
    """The first line of a library's error, shortened because it may quote damaged bytes."""
    line = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    return re.sub(r" <[\w.]+ object at 0x[0-9a-f]+>", " it", line)[:200]


@contextmanager
def reading(where: str | Path, hint: str = "") -> Iterator[None]:
    """Within this context, every exception of a library that reads bytes of others becomes a DataError with the place.

    Libraries raise many classes of exceptions on damaged or hostile bytes, and new versions raise others.
    """
    try:
        yield
    except DtrainError:
        raise
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    except MemoryError as error:
        raise DataError(f"{where}: needs more memory than there is", hint) from error
    except UnicodeDecodeError as error:
        way_out = "save it as UTF-8, or convert it: iconv -f cp1252 -t utf-8 FILE"
        raise DataError(f"{where}: is not UTF-8: {reason(error)}", way_out) from error
    except Exception as error:
        raise DataError(f"{where}: cannot be read: {reason(error)}", hint) from error
