"""Image files, a folder for each class, in a directory or a zip."""

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

import jax
import numpy as np

from dtrain.batch import Batch, Example
from dtrain.data.pixels import Pixels
from dtrain.data.source import Load, Source, Split, image_example
from dtrain.errors import DataError
from dtrain.fields import Fraction, Positive

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}
SPLITS = {"train": "train", "test": "test", "val": "test", "valid": "test", "validation": "test"}
LAYOUT = "a folder for each class, with image files in it; or train/ and test/ folders that hold such"


@dataclass(frozen=True, kw_only=True)
class Images:
    """Image files under `root`: CLASS/FILE, or train/CLASS/FILE and test/CLASS/FILE."""

    kind: Literal["images"] = "images"
    root: str
    """A folder or a .zip."""
    size: tuple[Positive, Positive]
    """Height and width to which every image is scaled."""
    channels: Literal[1, 3] = 3
    test: Fraction = 0.1
    """The part held out for testing where there is no test folder, chosen by file name."""
    pixels: Pixels = field(default_factory=Pixels)
    load: Load = field(default_factory=Load)

    @property
    def keyed(self) -> bool:
        return self.pixels.keyed

    def example(self) -> Example | None:
        return None

    def open(self, split: Split) -> Source:
        root = Path(self.root).expanduser()
        files = sorted(_files(root))
        if not files:
            raise DataError(f"{root} holds no image of a class", f"dtrain expects {LAYOUT}")
        classes = sorted({name for _, name, _, _ in files})
        split_folders = any(part == "test" for part, _, _, _ in files)
        chosen = [
            (path, classes.index(name), size)
            for part, name, path, size in files
            if (part if split_folders else _drawn(path, self.test)) == split
        ]
        if not chosen:
            raise DataError(f"{root} holds no image to {split} on", f"dtrain expects {LAYOUT}")
        return ImageFiles(root, tuple(chosen), (*self.size, self.channels), len(classes), split)

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        return self.pixels.apply(batch, 255.0, key, train)


@dataclass(frozen=True)
class ImageFiles:
    """(path, class, bytes) of each image, decoded when asked for."""

    root: Path
    files: tuple[tuple[str, int, int], ...]
    shape: tuple[int, int, int]
    classes: int
    split: str
    starts: None = None

    @property
    def example(self) -> Example:
        return image_example(self.shape, self.classes)

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr((self.files, self.shape)).encode()).hexdigest()[:16]
        return f"images:{self.split}:{len(self.files)}:{digest}"

    def __len__(self) -> int:
        return len(self.files)

    def rows(self, indices: np.ndarray) -> Batch:
        images = np.empty((len(indices), *self.shape), np.uint8)
        for row, index in enumerate(indices):
            images[row] = self._decode(self.files[index][0])
        return {"image": images, "label": np.array([self.files[i][1] for i in indices], np.int32)}

    def _decode(self, path: str) -> np.ndarray:
        from PIL import Image, UnidentifiedImageError

        height, width, channels = self.shape
        try:
            with self._open(path) as file, Image.open(file) as image:
                scaled = image.convert("L" if channels == 1 else "RGB").resize((width, height))
        except (OSError, UnidentifiedImageError, zipfile.BadZipFile, SyntaxError, ValueError) as error:
            where = f"{self.root}/{path}"
            raise DataError(f"{where}: cannot be read as an image: {error}", "mend or remove the file") from error
        return np.asarray(scaled, np.uint8).reshape(self.shape)

    def _open(self, path: str) -> IO[bytes]:
        return self._zip.open(path) if self.root.is_file() else (self.root / path).open("rb")

    @cached_property
    def _zip(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.root)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_zip"}


def _files(root: Path) -> Iterator[tuple[str, str, str, int]]:
    """(split, class, path below root, bytes) of every image."""
    for path, size in _listing(root):
        parts = PurePosixPath(path).parts
        if PurePosixPath(path).suffix.lower() not in SUFFIXES or len(parts) < 2:
            continue
        split = SPLITS.get(parts[0], "") if len(parts) > 2 else ""
        yield split or "train", parts[1] if split else parts[0], path, size


def _listing(root: Path) -> Iterator[tuple[str, int]]:
    if root.is_dir():
        yield from ((str(p.relative_to(root).as_posix()), p.stat().st_size) for p in root.rglob("*") if p.is_file())
    elif not root.exists():
        raise DataError(f"{root} does not exist", f"set data.root to {LAYOUT}; or to a .zip of that")
    else:
        try:
            with zipfile.ZipFile(root) as file:
                yield from ((entry.filename, entry.file_size) for entry in file.infolist() if not entry.is_dir())
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{root}: cannot be read as a zip: {error}") from error


def _drawn(path: str, test: float) -> Split:
    """The split of a file, drawn from its name alone, so that adding files moves none."""
    draw = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") / 2**32
    return "test" if draw < test else "train"
