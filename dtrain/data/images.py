"""Image files with one folder per class, in a folder or a zip file."""

import hashlib
import os
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import jax

from dtrain.core.errors import DataError
from dtrain.core.types import Fraction, Positive
from dtrain.data.batch import Batch, Example
from dtrain.data.data_check import ENTRIES, DataCheck, few
from dtrain.data.digest_cache import NO_CACHE, cached_by_file, file_digest, file_stamp
from dtrain.data.image_files import ImageFile, ImageFiles
from dtrain.data.paths import expand_path, reason
from dtrain.data.pixels import Pixels, WithPixels
from dtrain.data.source import Load, Source, Split

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}
SPLITS = {"train": "train", "test": "test", "val": "test", "valid": "test", "validation": "test"}
LAYOUT = "one folder per class with image files in it, or train/ and test/ folders that contain such class folders"


@dataclass(frozen=True, kw_only=True)
class Images(WithPixels):
    """Image files under `root`: CLASS/FILE, or train/CLASS/FILE and test/CLASS/FILE."""

    kind: Literal["images"] = "images"
    root: str
    """A folder or a .zip file."""
    size: tuple[Positive, Positive]
    """Height and width to which every image is resized."""
    channels: Literal[1, 3] = 3
    """1 for grayscale, 3 for RGB."""
    test: Fraction = 0.1
    """Fraction of the images held out for testing, selected by a hash of the file name; used only if there is no test
    folder."""
    draft: bool = False
    """Decode large JPEG files at 1/2, 1/4 or 1/8 of their size, whichever is still at least `size`: much faster, with
    slightly different pixels."""
    pixels: Pixels = field(default_factory=Pixels)
    cache: str = "~/.cache/dtrain"
    """Folder in which digests of the files are cached, so that later starts need not read every file."""
    load: Load = field(default_factory=Load)

    @property
    def packages(self) -> tuple[str, ...]:
        return ("PIL",)

    def example(self) -> Example | None:
        return None

    def open(self, split: Split) -> Source:
        root = expand_path(self.root)
        images = sorted(_files(root))
        if not images:
            raise DataError(f"{root} contains no image in a class folder", f"dtrain expects {LAYOUT}")
        names = sorted({name for _, name, _ in images})
        labels = {name: label for label, name in enumerate(names)}
        split_folders = any(part == "test" for part, _, _ in images)
        selected = [
            (labels[name], entry)
            for part, name, entry in images
            if (part if split_folders else _hashed_split(entry.path, self.test)) == split
        ]
        if not selected:
            raise DataError(f"{root} contains no image for the {split} split", f"dtrain expects {LAYOUT}")
        shape = (*self.size, self.channels)
        digests = [entry.digest for _, entry in selected]
        if root.is_dir():
            digests = cached_by_file(
                self.cache, f"images {split}", [root / entry.path for _, entry in selected], file_digest
            )
        content = [(entry.path, label, digest) for (label, entry), digest in zip(selected, digests, strict=True)]
        decoded = (content, shape, "draft") if self.draft else (content, shape)
        digest = hashlib.sha256(repr(decoded).encode(errors="surrogateescape")).hexdigest()[:16]
        files = tuple(ImageFile(entry.path, label, entry.size, entry.mtime_ns) for label, entry in selected)
        size, mtime, *_ = file_stamp(root)
        zipped = None if root.is_dir() else (size, mtime)
        fingerprint = f"images:{split}:{len(files)}:{digest}"
        return ImageFiles(
            root, files, shape, classes=tuple(names), fingerprint=fingerprint, draft=self.draft, zipped=zipped
        )

    def without_cache(self) -> "Images":
        return replace(self, cache=NO_CACHE)

    def inspect(self, check: DataCheck) -> None:
        root = Path(self.root).expanduser()
        if root.is_dir() and not few([str(root / "**" / "*")]):
            check.not_checked.append(f"data: the images of {root}, over {ENTRIES:,} files")
        elif root.exists() and not (root.is_dir() or root.is_file()):
            check.problems.append(("data.root", DataError(f"{root} is neither a folder nor a .zip")))
        else:
            check.open(self, "data.root")

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        return self.pixels.apply(batch, 255.0, key, train)


class Entry(NamedTuple):
    """A file below the root."""

    path: str
    size: int
    mtime_ns: int
    digest: str = ""
    """For a file in a zip: its CRC and size from the zip directory, which every read verifies."""


def _files(root: Path) -> Iterator[tuple[str, str, Entry]]:
    """Yield (split, class, file) of every image."""
    for entry in _entries(root):
        parts = PurePosixPath(entry.path).parts
        if not _is_image(entry.path) or len(parts) < 2 or any(part.startswith((".", "__MACOSX")) for part in parts):
            continue
        split = SPLITS.get(parts[0], "") if len(parts) > 2 else ""
        yield split or "train", parts[1] if split else parts[0], entry


def _entries(root: Path) -> Iterator[Entry]:
    try:
        if not root.exists():
            raise DataError(f"{root} does not exist", f"set data.root to a folder, or a .zip file, with {LAYOUT}")
        yield from _below(root) if root.is_dir() else _zipped(root)
    except OSError as error:
        raise DataError(f"{error.filename or root}: cannot be read: {error.strerror or error}") from error


def _below(root: Path) -> Iterator[Entry]:
    def fail(error: OSError) -> None:
        raise error  # os.walk would skip an unreadable folder, and its class would be missing

    for folder, subfolders, names in os.walk(root, onerror=fail, followlinks=True):
        for link in (path for path in (Path(folder, name) for name in subfolders) if path.is_symlink()):
            if Path(folder).resolve().is_relative_to(link.resolve()):
                raise DataError(f"{link}: is a link to a folder that contains it", "remove the link")
        for path in (Path(folder, name) for name in names if _is_image(name)):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                yield Entry(path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns)


def _is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def _zipped(root: Path) -> list[Entry]:
    try:
        with zipfile.ZipFile(root) as file:
            entries = [entry for entry in file.infolist() if not entry.is_dir()]
    except Exception as error:  # a damaged zip directory raises other errors than BadZipFile, too
        raise DataError(f"{root}: cannot be read as a zip: {reason(error)}") from error
    names = [entry.filename for entry in entries]
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise DataError(f"{root}: contains {name} {count} times", "create the zip again with each name once")
    return [Entry(entry.filename, entry.file_size, 0, f"{entry.CRC:08x}:{entry.file_size}") for entry in entries]


def _hashed_split(path: str, test: float) -> Split:
    """The split of a file, from a hash of its path alone, so that new files do not move others between splits."""
    digest = hashlib.sha256(path.encode(errors="surrogateescape")).digest()
    return "test" if int.from_bytes(digest[:4], "big") / 2**32 < test else "train"
