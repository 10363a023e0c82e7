"""Images in the IDX format of MNIST and similar data sets, gzipped or not.

The format: two zero bytes, one byte for the dtype (8: unsigned byte), one byte for the number of dims, the dims as
big-endian 32-bit integers, then the values. (yann.lecun.com/exdb/mnist)
"""

import gzip
import hashlib
import math
import os
import struct
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, Literal

import jax
import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import Positive
from dtrain.data.arrays import Arrays, image_example
from dtrain.data.batch import IMAGE, LABEL, Batch, Example
from dtrain.data.data_check import BYTES, SPLITS, DataCheck
from dtrain.data.guess import Guess
from dtrain.data.paths import expand_path
from dtrain.data.pixels import Pixels, WithPixels
from dtrain.data.source import Load, Source, Split

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
MNIST = {  # sha256 of the uncompressed content; the gzip files differ between mirrors
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
)
UNSIGNED_BYTE = 8
DEFLATE = 1032
"""Maximum compression ratio of gzip (DEFLATE)."""
UNREADABLE = (OSError, EOFError, zlib.error)
"""Errors of reading a damaged or missing file."""


@dataclass(frozen=True, kw_only=True)
class IDX(WithPixels):
    """Images and labels in four files named as those of MNIST; MNIST itself is downloaded if they are missing."""

    kind: Literal["idx"] = "idx"
    root: str = "data/mnist"
    """Folder of the files; a relative path is looked up in the recipe's folder first, then in the current folder."""
    classes: Positive = 10
    """Number of classes."""
    download: bool = True
    """Download MNIST if `root` lacks the files."""
    mirrors: tuple[str, ...] = MIRRORS
    """URLs of folders with the four files as .gz, tried in order."""
    pixels: Pixels = field(default_factory=Pixels)
    load: Load = field(default_factory=Load)

    @classmethod
    def guesses(cls, path: Path) -> Iterator[Guess]:
        data = cls(root=str(path), download=False)
        if not path.is_dir() or any(data._find(name) is None for names in FILES.values() for name in names):
            return
        (image, label), classes = FILES["train"], 0
        found = data._find(image)
        assert found
        for name in (label, FILES["test"][1]):
            labels = data._find(name)
            own = read(labels) if labels else np.zeros(0)
            classes = max(classes, int(own.max()) + 1 if own.size else 0)
        section = {"root": str(path), "download": False} | ({"classes": classes} if classes != 10 else {})
        count = _header(found)[0][0]
        yield Guess(f"{count:,} pictures of {classes} classes in files named as those of MNIST", section, "--kind idx")

    @property
    def example_from_files(self) -> bool:
        return True

    def example(self) -> Example | None:
        path = self._find(FILES["train"][0])
        return image_example(_image_shape(path, _header(path)[0]), self.classes) if path else None

    def open(self, split: Split) -> Source:
        paths = [self._find_or_fetch(name) for name in FILES[split]]
        images, labels = (read(path) for path in paths)
        shape = _image_shape(paths[0], images.shape)
        if labels.ndim != 1:
            raise DataError(f"{paths[1]}: labels have {labels.ndim} dims; 1 is expected")
        if len(images) != len(labels):
            raise DataError(f"{self.root}: {len(images)} images but {len(labels)} labels in the {split} files")
        if not len(labels):
            raise DataError(f"{self.root}: the {split} files contain no example")
        if labels.max() >= self.classes:
            hint = f"set data.classes to {labels.max() + 1}"
            message = f"{self.root}: label {labels.max()} with {self.classes} classes; labels count from 0"
            raise DataError(message, hint)
        digest = hashlib.sha256(repr((images.shape, hashlib.sha256(labels.data).digest())).encode())
        digest.update(images.data)
        features = {IMAGE: images.reshape(-1, *shape), LABEL: labels.astype(np.int32)}
        fingerprint = f"idx:{split}:{len(labels)}:{digest.hexdigest()[:16]}"
        return Arrays(features, image_example(shape, self.classes), fingerprint)

    def inspect(self, check: DataCheck) -> None:
        root = Path(self.root).expanduser()
        files = {name: self._find(name) for split in SPLITS for name in FILES[split]}
        missing = [name for name, path in files.items() if path is None]
        if missing and self.download:
            check.not_checked.append(f"data: {root} lacks {missing[0]}; the run downloads MNIST into it")
        elif check.too_large(f"the labels and contents of {root}", [path for path in files.values() if path], BYTES):
            example = self.example()
            check.examples |= {"train": example} if example else {}
        else:
            check.open(self, "data.root")

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        return self.pixels.apply(batch, 255.0, key, train)

    def _find(self, name: str) -> Path | None:
        root = expand_path(self.root)
        return next((path for path in (root / name, root / f"{name}.gz") if path.is_file()), None)

    def _find_or_fetch(self, name: str) -> Path:
        path = self._find(name)
        return path or (fetch(name, Path(self.root).expanduser(), self.mirrors) if self.download else _missing(self))


def _missing(data: IDX) -> Path:
    raise DataError(f"{data.root} lacks {FILES['train'][0]}[.gz] or one of its companions", offline_hint(data.root))


def offline_hint(root: str | Path) -> str:
    """How to provide the files without a network."""
    names = ", ".join(f"{name}.gz" for pair in FILES.values() for name in pair)
    return f"without a network, put {names} into {root}, or set data.root to a folder that has them"


def read(path: Path) -> np.ndarray:
    """Read an IDX file of unsigned bytes as a uint8 array; DataError names the file and the problem."""
    dims, offset = _header(path)
    expected = math.prod(dims)
    try:
        # bound the size by the file, not by the header alone, which may be damaged
        limit = path.stat().st_size * (DEFLATE if path.suffix == ".gz" else 1) + 1
        with _opened(path) as file:
            content = file.read(min(offset + expected + 1, limit))
    except (*UNREADABLE, MemoryError) as error:
        raise DataError(f"{path}: cannot be read: {error or type(error).__name__}", _replace_hint(path)) from error
    count = len(content) - offset
    if expected != count:
        shape, actual = " x ".join(map(str, dims)), "more" if count > expected else f"{count}"
        message = f"{path}: the header declares {shape} = {expected} bytes, but {actual} follow"
        raise DataError(message, _replace_hint(path))
    return np.frombuffer(content, np.uint8, offset=offset).reshape(dims)


def fetch(name: str, root: Path, mirrors: tuple[str, ...]) -> Path:
    """Download one file of MNIST into `root` and verify its checksum; DataError if no mirror has it."""
    failures = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{name}.gz"
        try:
            with urllib.request.urlopen(url, timeout=20) as response:
                packed = response.read()
            digest = hashlib.sha256(gzip.decompress(packed)).hexdigest()
        except (*UNREADABLE, HTTPException, ValueError) as error:
            failures.append(f"{url}: {error}")
            continue
        if digest != MNIST[name]:
            failures.append(f"{url}: the content has sha256 {digest[:12]}..., not {MNIST[name][:12]}...")
            continue
        try:
            root.mkdir(parents=True, exist_ok=True)
            part = root / f".{name}.gz.part-{os.getpid()}"
            part.write_bytes(packed)
            return part.rename(root / f"{name}.gz")
        except OSError as error:
            hint = "set data.root to a folder that you can write to"
            raise DataError(f"cannot write MNIST to {root}: {error}", hint) from error
    raise DataError(f"could not download {name}:\n" + "\n".join(f"  {line}" for line in failures), offline_hint(root))


def _opened(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _header(path: Path) -> tuple[tuple[int, ...], int]:
    """The dims of the array and the offset of its values in the file."""
    try:
        with _opened(path) as file:
            start = file.read(4 + 4 * 255)
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}", _replace_hint(path)) from error
    if len(start) < 4 or start[:2] != b"\0\0":
        content = f"begins with {start[:4].hex(' ')}, not with 00 00" if len(start) >= 4 else f"has {len(start)} bytes"
        raise DataError(f"{path}: not an IDX file: it {content}", _replace_hint(path))
    if start[2] != UNSIGNED_BYTE:
        raise DataError(f"{path}: has values of IDX type {start[2]}; only unsigned bytes (8) are supported")
    if not 1 <= start[3] <= 4:
        raise DataError(f"{path}: an array of {start[3]} dims; 1 to 4 are supported", _replace_hint(path))
    offset = 4 + 4 * start[3]
    if len(start) < offset:
        raise DataError(f"{path}: ends within its header", _replace_hint(path))
    return struct.unpack(f">{start[3]}I", start[4:offset]), offset


def _image_shape(path: Path, dims: tuple[int, ...]) -> tuple[int, int, int]:
    """Height, width, channels of arrays (examples, height, width[, channels])."""
    if len(dims) not in (3, 4):
        expected = "3 or 4 are expected: examples, height, width and optionally channels"
        raise DataError(f"{path}: the images have {len(dims)} dims; {expected}")
    if 0 in dims[1:]:
        raise DataError(f"{path}: the images are empty: {' x '.join(map(str, dims[1:]))}")
    return (dims[1], dims[2], dims[3] if len(dims) == 4 else 1)


def _replace_hint(path: Path) -> str:
    return f"remove {path} and run again to download it, or replace it by a correct copy"
