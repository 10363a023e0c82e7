"""Image files, decoded on demand.

The content of the files is not trusted: only the formats in FORMATS are decoded, never by an external program, and only
up to MAX_PIXELS pixels.
"""

import io
import math
import os
import threading
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from multiprocessing import parent_process
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Le

from dtrain.core.errors import DataError
from dtrain.core.files import POINTER
from dtrain.data.arrays import image_example
from dtrain.data.batch import IMAGE, LABEL, Batch, Example
from dtrain.data.overlap import hashes
from dtrain.data.paths import reason
from dtrain.data.source import CHANGED, SourceDefaults

FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "WEBP", "PPM", "TIFF")
"""Formats by content, not by file name: otherwise Pillow would start Ghostscript for an EPS file named .png."""
MAX_PIXELS = 2**26
THREADS = 16
"""Images that are decoded at the same time, at most."""
KEPT = 2**29
"""Most bytes of decoded pictures that a source keeps, so that each is decoded once and not in every epoch."""
MAX_BYTES = 2**28
"""Maximum size of a file."""


Fit = Literal["crop", "pad", "stretch"]
Byte = Annotated[int, Ge(0), Le(255)]
Colour = tuple[Byte, Byte, Byte]
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
"""Pillow's modes with at most 8 bits for each value."""
ORIENTATION = 0x0112
"""The EXIF tag that says how the camera was held."""
ACROSS = (5, 6, 7, 8)
"""Its values that exchange width and height."""
ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "GIF": b";"}
"""What a complete file of a format has among its last bytes."""
TAIL = 64


class Decoding(NamedTuple):
    """How the bytes of a file become pixels."""

    fit: Fit = "crop"
    background: Colour = (255, 255, 255)
    draft: bool = False


class Head(NamedTuple):
    """What the header of a picture says."""

    problem: str = ""
    """Why it cannot be used; empty if it can."""
    turned: bool = False
    """Whether its EXIF data turns or mirrors it."""
    alpha: bool = False
    """Whether it may have transparent pixels."""
    frames: int = 1


def head(path: Path) -> Head:
    """The header of a picture. It is decoded only where its end looks cut off."""
    with path.open("rb") as file:
        return _head(file, path.stat().st_size)


def heads_in_zip(root: Path, paths: Sequence[str]) -> list[Head]:
    """The headers of pictures in a zip file; no more is unpacked: a cut one has a wrong checksum when it is read."""
    heads = []
    with zipfile.ZipFile(root) as opened:
        for path in paths:
            try:
                with opened.open(path) as file:
                    heads.append(_head(file))
            except Exception as error:  # a damaged member raises errors of many classes
                heads.append(Head(f"cannot be read as an image: {reason(error)}"))
    return heads


def sizes_of(root: Path, paths: Sequence[str]) -> tuple[list[int], bool]:
    """The shorter side of each picture below a folder, or in a zip file, and whether all are gray. Those that cannot be
    read are left out."""
    from PIL import Image

    sides, modes = [], set()
    with ExitStack() as stack:
        zipped = None if root.is_dir() else stack.enter_context(zipfile.ZipFile(root))
        for path in paths:
            with suppress(Exception), warnings.catch_warnings():  # damaged ones are named when the data is opened
                warnings.simplefilter("ignore")
                with zipped.open(path) if zipped else (root / path).open("rb") as file, Image.open(file) as image:
                    sides.append(min(image.size))
                    modes.add(image.mode)
    return sides or [0], bool(modes) and modes <= {"L", "1"}


def head_of(content: bytes) -> Head:
    """The header of a picture in memory."""
    return _head(io.BytesIO(content), len(content))


def _head(file: IO[bytes], size: int | None = None) -> Head:
    """The header, and with the size of the file also its end."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images and of damaged EXIF data
            with Image.open(file, formats=FORMATS) as image:
                if refusal := _refusal(image):
                    return Head(refusal)
                mark = ENDS.get(image.format or "")
                turned = image.getexif().get(ORIENTATION, 1) not in (0, 1)
                found = Head("", turned, image.has_transparency_data, 2 if getattr(image, "is_animated", False) else 1)
                if mark and size is not None:
                    file.seek(max(0, size - TAIL))
                    if mark not in file.read(TAIL):
                        file.seek(0)
                        image.load()
                return found
    except UnidentifiedImageError:
        file.seek(0)
        if file.read(len(POINTER)) == POINTER:
            return Head("is a pointer of Git LFS, not the file itself: git lfs pull")
        return Head(f"cannot be read as an image: it has none of the formats {', '.join(FORMATS)}")
    except Exception as error:  # decoders raise errors of any class on damaged bytes
        return Head(f"cannot be read as an image: {reason(error)}")


def _refusal(image: Any) -> str:
    """Why an image cannot be used, from its header; empty if it can."""
    if image.width * image.height > MAX_PIXELS:
        return f"has {image.width} x {image.height} pixels; the limit is {MAX_PIXELS:,}"
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return f"has more than 8 bits per value (mode {image.mode}); only 8 are supported: convert it to 8 bits"
    return "" if image.mode in MODES else f"has the mode {image.mode}, which is not supported: convert it to RGB"


def _pixels(image: Any, shape: tuple[int, int, int], how: Decoding) -> np.ndarray:
    """The pixels of an opened image, (height, width, channels): upright, over the background, of that shape."""
    from PIL import Image, ImageOps

    (height, width, channels), (fit, background, draft) = shape, how
    mode = "L" if channels == 1 else "RGB"
    if draft:
        across = image.getexif().get(ORIENTATION) in ACROSS
        image.draft(mode, (height, width) if across else (width, height))
    if image.getexif().get(ORIENTATION, 1) not in (0, 1):
        image = ImageOps.exif_transpose(image)  # a copy
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), image)
    image = image.convert(mode)
    if fit == "crop":
        image = ImageOps.fit(image, (width, height))
    elif fit == "pad":
        colour: Any = Image.new("RGB", (1, 1), background).convert(mode).getpixel((0, 0))
        image = ImageOps.pad(image, (width, height), color=colour)
    else:
        image = image.resize((width, height))
    return np.asarray(image, np.uint8).reshape(shape)


def decoded(where: str, read: Callable[[], bytes], shape: tuple[int, int, int], how: Decoding) -> np.ndarray:
    """The pixels (height, width, channels) of the picture whose bytes `read` gives. DataError if it cannot be used."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(read()), formats=FORMATS) as image:
            if refusal := _refusal(image):
                raise DataError(f"{where}: {refusal}", "repair or remove the file")
            return _pixels(image, shape, how)
    except DataError:
        raise
    except Exception as error:  # decoders raise errors of any class on damaged bytes
        message = f"{where}: cannot be read as an image: {reason(error)}"
        raise DataError(message, "repair or remove the file") from error


class Threads:
    """Threads that decode without the GIL: all cores, or one in a worker process, which has others beside it."""

    def each(self, count: int, decode: Callable[[int], None]) -> None:
        """Call `decode` with each row from 0 to `count` - 1."""
        threads = self._number

        def several(first: int) -> None:
            for row in range(first, count, threads):
                decode(row)

        starts = range(min(threads, count))
        deque(self._pool.map(several, starts) if len(starts) > 1 else map(several, starts), maxlen=0)

    @cached_property
    def _number(self) -> int:
        return 1 if parent_process() else min(os.cpu_count() or 1, THREADS)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._number, "decode")

    def __getstate__(self) -> dict[str, object]:
        return {}


class ImageFile(NamedTuple):
    """An image: its path below the root, its class, and the size and modification time of its file when opened."""

    path: str
    label: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class ImageFiles(SourceDefaults):
    """A source of images in a folder or a zip file."""

    root: Path
    files: tuple[ImageFile, ...]
    shape: tuple[int, int, int]
    """Height, width, channels."""
    classes: tuple[str, ...]
    """Names of the classes."""
    fingerprint: str
    decoding: Decoding
    found: tuple[str, ...] = ()
    """What was found in the folder, as lines."""
    digests: tuple[str, ...] = ()
    """Of the content of each file; empty texts if the files were not read."""
    zipped: tuple[int, int] | None = None
    """Size and modification time of the zip file; None for a folder."""
    threads: Threads = field(default_factory=Threads, compare=False, repr=False)

    @property
    def notes(self) -> Sequence[str]:
        return self.found

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classes

    @property
    def row_labels(self) -> np.ndarray | None:
        return np.array([file.label for file in self.files], np.int32)

    @property
    def content_hashes(self) -> np.ndarray | None:
        return hashes(digest.encode() for digest in self.digests) if all(self.digests) and self.digests else None

    @property
    def example(self) -> Example:
        return image_example(self.shape, len(self.classes))

    def __len__(self) -> int:
        return len(self.files)

    def place(self, index: int) -> str:
        return self.files[index].path

    def rows(self, indices: np.ndarray) -> Batch:
        changed = self.changed()
        if changed:
            raise DataError(changed, CHANGED)
        images = np.empty((len(indices), *self.shape), np.uint8)

        kept = self._kept

        def decode(row: int) -> None:
            index = int(indices[row])
            if kept is None:
                images[row] = self._decoded(self.files[index])
                return
            pixels, known = kept
            if not known[index]:
                pixels[index] = self._decoded(self.files[index])
                known[index] = True  # after its pixels: another thread may look
            else:
                self._refuse_replaced(self.files[index])
            images[row] = pixels[index]

        if self.zipped is not None:
            _ = self._zip  # opened once, before the threads need it
        self.threads.each(len(indices), decode)
        return {IMAGE: images, LABEL: np.array([self.files[i].label for i in indices], np.int32)}

    def changed(self) -> str:
        """How the zip changed after it was opened; empty if it did not. Files in a folder are checked when read."""
        if self.zipped is None:
            return ""
        try:
            status = self.root.stat()
        except OSError as error:
            return f"{self.root}: can no longer be read: {error.strerror}"
        same = (status.st_size, status.st_mtime_ns) == self.zipped
        return "" if same else f"{self.root}: was modified or replaced after it was opened"

    @cached_property
    def _kept(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The decoded pictures, and which of them are decoded; None if they are too many to keep."""
        if len(self.files) * math.prod(self.shape) > KEPT:
            return None
        return np.zeros((len(self.files), *self.shape), np.uint8), np.zeros(len(self.files), bool)

    def _refuse_replaced(self, file: ImageFile) -> None:
        """DataError if a file of a folder is no longer the one that was opened."""
        if self.zipped is None:
            path = self.root / file.path
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                raise DataError(f"{path}: was modified or replaced after the run started", CHANGED)

    def _decoded(self, file: ImageFile) -> np.ndarray:
        where = f"{str(self.root).rstrip('/')}/{file.path}"
        return decoded(where, partial(self._content, file), self.shape, self.decoding)

    def _content(self, file: ImageFile) -> bytes:
        """All bytes of a file; zipfile verifies the CRC of a file in a zip."""
        if file.size > MAX_BYTES:
            raise DataError(f"{self.root}/{file.path}: has {file.size:,} bytes; the limit is {MAX_BYTES:,}")
        if self.zipped is not None:
            opened, lock = self._zip
            with lock:
                return opened.read(file.path)
        self._refuse_replaced(file)
        return (self.root / file.path).read_bytes()

    @cached_property
    def _zip(self) -> tuple[zipfile.ZipFile, threading.Lock]:
        return zipfile.ZipFile(self.root), threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_zip", "_kept")}
