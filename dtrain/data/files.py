"""The files that a recipe names: paths, globs, and addresses in object storage, copied into a local cache."""

import errno
import glob
import hashlib
import shutil
from collections.abc import Iterable
from glob import has_magic
from pathlib import Path
from typing import Any

from dtrain.core import extras
from dtrain.core.errors import DataError, EnvironmentFault
from dtrain.core.files import atomic_write, file_lock, refuse_pointer
from dtrain.data.digest_cache import read_sealed, write_sealed
from dtrain.data.paths import CACHE, expand_path, is_remote, reason

HERE = "a relative path starts at the current folder; ** matches any folders"
"""For files that are named on the command line."""
RELATIVE = "a relative path starts at the recipe's folder or the current folder; ** matches any folders"
"""For files that a recipe names."""
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs", "hf": "huggingface_hub"}
"""The package that reads each kind of address; fsspec finds it."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that is written to."""
SIGN_IN = {"gs": "gcloud auth application-default login", "s3": "aws configure, or AWS_ACCESS_KEY_ID"}


def resolve_files(names: tuple[str, ...], what: str, hint: str = RELATIVE, cache: str = CACHE) -> list[Path]:
    """All files that match the names or globs, in the order of the names and sorted within each, without duplicates.

    Of files in object storage, their copies in `cache`. `what` describes their content for messages. DataError if a
    name matches no file.
    """
    files: list[Path] = []
    for name in names:
        if is_remote(name):
            files += [path for path in fetched(name, what, cache) if path not in files]
            continue
        path = expand_path(name)
        matched = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207
        matched = [path for path in matched if path.is_file()]
        if not matched:
            raise DataError(f"no file of {what} matches {name}", hint)
        files += [path for path in matched if path not in files]
    for path in files:
        refuse_pointer(path)
    if not files:
        raise DataError(f"data.files is empty: it must name at least one file of {what}")
    return files


def address_packages(names: Iterable[str | None]) -> tuple[str, ...]:
    """The packages that read those of the names that are addresses."""
    kinds = (name.partition("://")[0] for name in names if name and is_remote(name))
    return tuple(PACKAGES[kind] for kind in kinds if kind in PACKAGES)


def fetched(address: str, what: str, cache: str) -> list[Path]:
    """Local copies of the files that the address or glob matches, in the order of their names.

    A copy is used again as long as its original has the same size and version. DataError if nothing matches or the
    storage cannot be read, EnvironmentFault if the cache cannot be written.
    """
    kind = address.partition("://")[0]
    try:
        import fsspec

        files, path = fsspec.core.url_to_fs(address)
        names = _names(files, path)
        if not names:
            folder = not has_magic(path) and files.isdir(path)
            hint = f"it is a folder: {address.rstrip('/')}/*.jsonl names its files" if folder else ""
            raise DataError(f"no file of {what} matches {address}", hint)
        return [_copied(files, str(name), kind, cache) for name in names]
    except ImportError as error:
        package = PACKAGES.get(kind, kind)
        message = f"{address}: reading {kind}:// needs the package {package}"
        raise EnvironmentFault(message, extras.command([package]), "E-PACKAGE") from error
    except (DataError, EnvironmentFault):
        raise
    except Exception as error:  # each kind of storage has errors of its own
        sign_in = SIGN_IN.get(kind)
        hint = f"if it asks for a login: {sign_in}" if sign_in else ""
        raise DataError(f"{address}: cannot be read: {reason(error)}", hint) from error


def _copied(files: Any, name: str, kind: str, cache: str) -> Path:
    about = files.info(name)
    version = {"address": f"{kind}://{name}", "size": about["size"], "version": files.ukey(name)}
    folder = hashlib.sha256(f"{kind}://{name}".encode()).hexdigest()[:16]
    path = expand_path(cache) / "remote" / folder / Path(name).name
    record = path.parent / ".version"
    try:
        with file_lock(path):
            if read_sealed(record) == version and path.is_file() and path.stat().st_size == version["size"]:
                return path
            record.unlink(missing_ok=True)
            with atomic_write(path) as target, files.open(name, "rb") as source:
                shutil.copyfileobj(source, target, 2**22)
            if version["size"] is not None and path.stat().st_size != version["size"]:
                message = f"{kind}://{name}: {path.stat().st_size:,} bytes came, it has {version['size']:,}"
                raise DataError(message, "run the same command again")
            write_sealed(record, version)
    except OSError as error:
        if error.errno in FULL or str(error.filename or "").startswith(str(expand_path(cache))):
            hint = "set data.cache to a folder that you can write to, with enough room"
            raise EnvironmentFault(f"cannot write {path}: {error.strerror}", hint) from error
        raise
    return path


def _names(files: Any, path: str) -> list[str]:
    if has_magic(path):
        return sorted(str(name) for name, about in files.glob(path, detail=True).items() if about["type"] == "file")
    return [path] if files.isfile(path) else []
